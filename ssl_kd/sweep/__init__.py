"""Train a grid of runs (`ssl_kd sweep`), and put finished runs in a table (`ssl_kd table`)."""
