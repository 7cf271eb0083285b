"""The tables of the DPNR paper (Lyu, He and Li 2020), 2 to 7, as printed there; all in per cent."""

# Table 2: accuracy of the main task by ε at μ = 0; Table 3: by μ at ε = 1.
BY_EPSILON = {
    "AG": {None: 78.75, 0.05: 80.87, 0.1: 80.78, 0.5: 79.71, 1.0: 79.36, 5.0: 79.59},
    "BLOG": {None: 97.07, 0.05: 96.69, 0.1: 96.39, 0.5: 96.84, 1.0: 96.39, 5.0: 96.66},
}
BY_DROPOUT = {
    "AG": {None: 78.75, 0.1: 80.71, 0.3: 79.18, 0.5: 77.42, 0.8: 69.57},
    "BLOG": {None: 97.07, 0.1: 96.05, 0.3: 93.76, 0.5: 90.98, 0.8: 82.94},
}
# Table 4: main task, and empirical privacy (1 - F on AG, 1 - X on BLOG). ADV and DPNR are printed
# there as differences from NON-PRIV; these are the sums.
MAIN_AND_PRIVACY = {
    "AG": {
        "majority": (57.79, 49.34),
        "none": (78.75, 23.24),
        "adversarial": (57.04, 49.67),
        "dpnr": (80.87, 54.37),
    },
    "BLOG": {
        "majority": (34.16, 46.96),
        "none": (97.07, 33.88),
        "adversarial": (94.63, 35.04),
        "dpnr": (96.69, 49.74),
    },
}
# Table 5: the attacker's accuracy where an entity is absent and where it is present.
ENTITY_ATTACK = {
    "entity_3": {"none": (96.71, 81.99), "adversarial": (98.57, 39.71), "dpnr": (90.86, 8.46)},
    "entity_4": {"none": (99.43, 47.20), "adversarial": (100.0, 0.0), "dpnr": (100.0, 0.0)},
    "entity_5": {"none": (96.93, 68.29), "adversarial": (99.87, 12.96), "dpnr": (100.0, 0.0)},
}
# Tables 6 (BLOG) and 7 (AG): accuracy of the main task in one group, and how much more it is in
# the other.
GROUPS = {
    ("BLOG", "gender"): {
        "pair": ("female", "male"),
        "none": (98.07, -2.18),
        "adversarial": (93.84, -7.54),
        "dpnr": (98.00, -2.34),
    },
    ("BLOG", "age"): {
        "pair": ("under 20", "30 and over"),
        "none": (97.05, -1.49),
        "adversarial": (91.91, -3.57),
        "dpnr": (97.09, -0.11),
    },
    ("AG", "entity_3"): {
        "pair": ("absent", "present"),
        "none": (82.67, -18.82),
        "adversarial": (48.92, 7.82),
        "dpnr": (83.60, -16.93),
    },
    ("AG", "entity_4"): {
        "pair": ("absent", "present"),
        "none": (80.86, -15.44),
        "adversarial": (49.64, 6.67),
        "dpnr": (81.79, -12.22),
    },
    ("AG", "entity_5"): {
        "pair": ("absent", "present"),
        "none": (80.22, -10.78),
        "adversarial": (49.43, 9.60),
        "dpnr": (81.04, -6.04),
    },
}
