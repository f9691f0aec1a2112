"""What the `gradient` graph differentiates, by the number that it is asked with."""

LOGIT = 0
SOFTMAX = 1  # the probability among all tokens or labels
SIGMOID = 2  # the probability of each label by itself
COSINE = 3  # of a text's vector with another: only of graphs that give one
