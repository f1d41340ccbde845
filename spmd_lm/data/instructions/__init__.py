"""Instruction data: conversations as a chat template writes them, of which only the answers are learned."""
