"""Neighbor graphs of points, for the tests of this folder."""

from sklearn.neighbors import NearestNeighbors

from ssl_kd.vision.graph import Graph, fuzzy_graph


def graph_of(x, k=10):
    distances, near = NearestNeighbors(n_neighbors=k).fit(x).kneighbors()
    return Graph(fuzzy_graph(near, distances))
