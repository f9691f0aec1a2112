"""Numbers that graphs of explanations are made with: what `gradient` differentiates, what a lens names."""

LOGIT = 0
SOFTMAX = 1  # the probability among all tokens or labels
SIGMOID = 2  # the probability of each label by itself
COSINE = 3  # of a text's vector with another: only of graphs that give one
LENS_TOKENS = 10  # the likeliest, of each place
