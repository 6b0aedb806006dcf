"""What a recovery does: the decision, the records it needs, the budget and the classification of endings."""
