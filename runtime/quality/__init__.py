"""Quality of outputs against references: BLEU, chrF, word error rate and their confidence intervals."""
