"""Instruction data: conversations rendered by a chat template, with a loss on answers only."""
