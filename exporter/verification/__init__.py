"""Does the export still compute the model?"""
