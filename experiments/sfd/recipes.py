"""Changes to configs/digits_sfd.py that several studies share."""

PAPER = {"sfd.solver": "dpmpp3m", "sfd.substeps": 4}  # the authors' teacher; configs/digits_sfd.py has a cheaper one
SINGLE = {**PAPER, "model.fields.step_embed": ""}  # SFD, one number of evaluations: no step condition
SECOND = {"sfd.solver": "euler", "sfd.teacher_afs": True, "sfd.teacher_step": 7, "sfd.substeps": 3}  # from 5 to 1
