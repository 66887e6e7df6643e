"""Find, start, watch and stop tritonserver."""
