"""Statistics: what batches add up to, by brick and phase, exactly and in bounded memory."""
