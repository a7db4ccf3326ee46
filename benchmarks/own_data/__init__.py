"""How good the defaults for own images are: features once per dataset, then thousands of simulated private heads."""
