"""How an optimizer step survives a failure: as a resumable transaction, or by a copy of the whole state after it."""
