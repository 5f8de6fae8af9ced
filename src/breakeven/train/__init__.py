"""Training an EAGLE-3 drafter: prompts, answers of the target itself, vocabulary, training, evaluation, export."""
