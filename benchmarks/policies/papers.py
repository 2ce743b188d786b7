"""Inputs that the papers leave open, and figures that `make bench NAME=policies` cannot show."""

from __future__ import annotations

CHOSEN = (
    "PEC GPT-MoE-Small: an untied head. Table 1's 323 million parameters are those of a tied one, "
    "but only an untied one (361 million) gives figure 5's 54.2 %: both are shown.",
    "PEC GPT-MoE-Small: experts in every second layer, of 4 x 768, in float32 with two moments. "
    "With the causal masks of GPT-2's code in the checkpoint, 54.2 and 76.9 % match to a tenth.",
    "PEC figure 5: 8 ranks with data and expert parallelism of 8.",
    "MoEtion 1.6B-64E: 27 layers of 2048 with an untied head, for 58.7 billion parameters and 587 "
    "and 61 GB; the paper gives no dimensions.",
    "MoEtion 2.9B-16E: 24 layers (section 4.1) of 3072 with a tied head, for 30.1 billion.",
    "MoEtion 3.8B-8E and 3.8B-32E: Mixtral 8x7B's dimensions, for 46.7 billion and 1820 GB.",
    "MoEtion: 10 bytes a parameter: bfloat16 and two moments in float32.",
    "MoEtion: 6 experts of each layer, which the paper names for 1.6B-64E only.",
    "Tokens at risk: a seeded trace with the skew of figure 3; the paper's traces are not public.",
)
"""Inputs chosen because they reproduce the papers' figures."""

NOT_REPRODUCED = (
    "PEC figure 2, 5(d) and 6: losses, accuracies and lost tokens of training runs "
    "(`make bench NAME=loss` has those of the example).",
    "PEC figure 5(c): seconds of a snapshot beside a step of 0.78 s, and so the 11.7 % less time; "
    "shown are the peaks that the time follows.",
    "MoEtion section 4.1: 85 % of 2.9B-16E are experts, and 75 % less with some of them; with 24 "
    "layers and 16 experts in each, 96 % are.",
    "MoEtion section 4.1: S is 25 to 40 % of the experts: follows from bandwidths not given.",
    "MoEtion section 7.2: 80 % of the tokens go to 6 of 64 experts; a property of their routing.",
    "MoEtion figure 9(a): 195 GB with 32 experts; 3 experts of each layer have 185 and 4 have 242, "
    "and the paper does not give the number.",
    "MoEtion section 7.5: 12.6, 10.9 and 7.0 s a checkpoint, up to 15 times as often, 12 times "
    "less wasted work; of their cluster.",
    "MoEtion section 5.1: up to 40 % less traffic (`make bench NAME=redundancy`).",
)
"""Figures that the papers print and that are not computed here, each with the reason."""
