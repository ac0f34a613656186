"""Name the ways in which samples are selected; free of slow imports, for the command line."""

METHODS = {
    "typical": "stand for many others: the centers of as many groups (default)",
    "diverse": "far apart, so that no sample is far from all of them; outliers come first",
    "balanced": "equally many of each cluster, the most certain first",
    "near": "most similar to the sample that --near names",
}
"""Method -> what the samples are."""
