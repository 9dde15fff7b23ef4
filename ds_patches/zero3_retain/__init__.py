"""zero3_retain"""
