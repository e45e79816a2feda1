"""Helpers of the property suite: the CPU seam, tiny real models, the reference, the subject, the cell's facts."""
