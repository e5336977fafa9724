"The evidence: what was compared, on which data, and what came of it; not a part of the package"
