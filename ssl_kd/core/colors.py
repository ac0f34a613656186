"""Define the colors of clusters and of numbers, one table for the map, the report and all figures.

The colors were chosen one by one: the next is the one of sRGB that is farthest in CIE Lab from
`MISSING` and from all before it, with a chroma below 90 and a contrast above 2 to white and to the
dark page. The first 24 also count the distance in Oklab, where blues are not overrated, and the
first twelve what people without red or green cones see (Machado et al., "A Physiologically-based
Model for Simulation of Color Vision Deficiency", 2009).
"""

CLUSTERS = tuple(
    f"#{color}"
    for color in """
    3f90da e69500 bd1f01 832db6 2fa36b ff91d7 46552d eb19b9 fa5569 69cd32 005af0 915a7d 00c8dc
    91731e af87ff 464b8c a5be8c 9b0069 007d00 00787d d7a0a0 823c19 d70069 eb64fa afaf00 e6784b
    c3aaeb a0324b a055aa 6e8c37 d7af6e 416ed7 876455 005f87 00be5a e67891 5fc8af 005f1e fa053c
    ff55af 9664ff 78beeb be695a 5a8c6e a55a00 7dc369 6ea00f a50596 6e6e96 ff5a14 af9b7d 5f41a5
    e164cd 9b1e19 d291b9 f5a082 b9003c 8778c3 b95087 af7d50 5032c8 0f91b4 64aaaf c3b950 6e501e
    ff8732 b49105 eb96ff 0a5f46 cd8c3c 5a5f00 733c78 87a0ff 9b9655 dc4b3c ff827d 824146 b928c8
    afaacd 00cd8c 00967d 87325a cd5505 e6558c 7d734b b45ad2 ff1e69 9bc30a cd058c 3c8c3c 6e64e1
    8796d2 00a000 a57d8c c887d2 e1af00 0064af 872382 ff0091 0046be 6ea064 b4502d 00b9ff 0091fa
    """.split()
)
"""Colors that differ by a distance (Delta E, CIE76) above 16; the first 24 by more than 25."""

MISSING = "#8b949e"
"""Color of a sample without a cluster or a value."""

RAMP = ("#3b4cc0", "#5b8dd6", "#86c5c2", "#d9d27a", "#f2a14a", "#c8362f")
"""Colors of numbers, from low to high."""


def tint(cluster: int) -> str:
    """Return the color of a cluster as `#rrggbb`; after 104 clusters they repeat.

    >>> tint(0), tint(104)
    ('#3f90da', '#3f90da')
    """
    return CLUSTERS[cluster % len(CLUSTERS)]
