"""The paper's experiments as data: a TOML file each. Running one fills its grid; finished runs are kept and shared.

plan = make_plan(find_study("table1"), scale="small", seeds=1)     # which runs; build_task=… for a task of one's own
folder = Folder(Path("results"), plan.study.name)
carry_out(plan, folder.store, device=torch.device("cpu"))          # those that are missing
tables = write_results(plan, folder)
"""
