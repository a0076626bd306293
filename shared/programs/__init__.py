"""What programs have in common: how they end, the command line of a stage, live answers.

May import the rooms above it. The programs have rooms of their own: `shared.bench`, `shared.demo`,
`shared.record`, `shared.notebook`.
"""
