"""Services of the process that know neither groups nor operations."""
