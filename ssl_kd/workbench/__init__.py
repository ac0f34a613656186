"""Work with finished clusters: explore, curate and export them."""
