"""What programs have in common: how they end, the command line of a stage, live answers.

May import the packages above. The programs themselves are packages of their own: `shared.bench`,
`shared.demo`, `shared.record`, `shared.notebook`, `shared.serve`.
"""
