"""Coverage: every token id, every position and every branch of a form, compared at small cost."""
