"""Bytes from strangers for every decoder: fed by hypothesis by default, by atheris with `make fuzz`."""
