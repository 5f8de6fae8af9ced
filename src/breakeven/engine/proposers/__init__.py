"""Proposers: what to draft for each request, behind one small interface."""
