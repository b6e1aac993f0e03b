"""Imported last by the server of forks of `support.processes`."""

from support.huge_pages import prepare_for_forks

prepare_for_forks()
