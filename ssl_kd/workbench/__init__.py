"""Work with finished clusters: explore, curate, name and export them."""
