"""Each proof shows what its row claims, on stock and patched."""
