"""What the programs refuse: one table, which tests/scripts/test_refusals.py runs.

A block has a program, its number of ranks, the arguments of each of its lines, and lines

    more arguments => the beginning of the message

where `...` stands for any text, also for a number that depends on the machine, and {x*90} for 90 times x. Programs
start in the folder that tests/refused_folder.py writes; one rank is this process.
"""

import re
import shlex

SEARCH = "train-allreduce --data few.h5 --model softmax --epochs 4 --batch-size 4 --validation 0.3"
CHAIN = "--env refusedchains:chain --learning-starts 20 --batch-size 8 --episodes 2 --seed 3 --train-every 1 --out r"
# fmt: off
REFUSALS = [
    ("bench_allreduce", 1, "", """
        --sizes 4kb => --sizes: write 64KiB, 4MiB, 1GiB or a number of bytes, not '4kb'
        --algorithms rong => unknown all-reduce algorithm 'rong' (did you mean 'ring'?);
    """),
    ("bench_batch_size", 1, "", """
        --batches 10,x => --batches: numbers with commas between, not '10,x'
        --seeds 0 => --seeds must be greater than 0
    """),
    ("bench_checkpoint", 2, "", """
        --folder nowhere => --folder nowhere: there is no such folder
    """),
    ("bench_gossip", 1, "", """
        --at 1,0 => --at: numbers above 0
    """),
    ("bench_gossip", 3, "", """
        --topologies ring,hypercube => a hypercube has a power of two of ranks, not 3
        --topologies one-peer => detag's gossip is accelerated on one graph
    """),
    ("bench_hogwild", 1, "", """
        --locking some => --locking: none, atomic, striped, global, round-robin or
        --data small:row=9 => shape of synthetic rows 'small' has no setting 'row'; write
        --data small:test=0 => --data small:test=0: there are no test rows, whose loss is
        --exchange-every 0 => --exchange-every: numbers above 0 with commas between, not 0
        --round-size -1 => --round-size must not be negative, and is -1
    """),
    ("bench_hogwild", 2, "", """
        --data small:row=9 => shape of synthetic rows 'small' has no setting 'row'; write
        --data small:test=0 => --data small:test=0: there are no test rows, whose loss is
    """),
    ("bench_kernels", 1, "", """
        --kernels momentun => unknown kernel 'momentun' (did you mean 'momentum'?); known:
        --dtype float16 => --dtype is float32 or float64, not float16
    """),
    ("bench_kernels", 2, "", """
        => bench-kernels measures one thread; start it on one rank
    """),
    ("bench_model_parallel", 1, "--data digits --steps 2", """
        --case idle => --case idle: a pipeline of 1 stage is never idle; start 2 ranks
    """),
    ("bench_model_parallel", 2, "--data digits --steps 2", """
        --microbatches 0 => --microbatches: numbers above 0 with commas between, not 0
    """),
    ("bench_replay", 1, "", """
        --batch-size 9 --capacity 8 => ... should be --capacity 8 at most
        --turns 0 => --turns must be greater than 0
        --capacity 10 --batch-size 2 => --replay 10 should be from 40
    """),
    ("bench_replay", 2, "", """
        => bench-replay measures one core; start it on one rank
    """),
    ("bench_search", 1, "", """
        --controller own => --ranks-per-trial 1: there are 0 ranks beside the one of
        --spread -1 => --spread -1.0: a number from 0 to 10
    """),
    ("bench_svrg", 2, "", """
        --model mlp => bench-svrg works on the coordinates of linear models
    """),
    ("checkpoint", 1, "", """
        pack nowhere => there is no file or folder nowhere
        verify . => there is no checkpoint in .
        show bad.h5 --out b.h5 => --out is where pack writes; show writes nothing
        pack bad.h5 --out nowhere/b.h5 => --out nowhere/b.h5 cannot be written
        look bad.h5 => ... expected one of 'show', 'verify', 'pack', not look
        show => the following arguments are required: run
    """),
    ("compare", 1, "", """
        --out c => there is nothing to compare: give lines, as "train-allreduce"
        train-alreduce 'train-gossip --topologie ring' --out c => line 1, 'train-alreduce': unknown program
        train-allreduce --seeds 1,2,1 --out c => --seeds: 1 is given twice; each seed counts once
        train-allreduce --seeds 0 --out c => --seeds: how many, or which with commas between, not '0'
        train-allreduce --seeds 99999999999 --out c => --seeds 99999999999: so many are not run; at most 10,000
        train-allreduce --seeds 3,99999999999999999999 --out c => ... a seed is a whole number of 64 bits
        train-allreduce --seed 3 --out c => --seed is of one run; give --seeds
        train-allreduce --target acuracy=0.9 --out c => --target acuracy=0.9: there is no 'acuracy' (did you mean
        train-allreduce --budget second=9 --out c => --budget second=9: there is no 'second' (did you mean
        train-allreduce --columns losses --out c => unknown column 'losses'; known: bytes_per_rank,
        train-allreduce --out none => --out none: a comparison is made of what its runs have written;
        train-allreduce --resume nowhere --out c => ... there is no run in that folder
        train-allreduce --out /proc/nothing => --out /proc/nothing cannot be written: No such file or directory
        --config line.yaml --out c => --config line.yaml: there is no option 'line' (did you mean
    """),
    ("doctor", 1, "", """
        --nonsense => unrecognized arguments: --nonsense
        --json rows.txt => --json rows.txt: the name should end in .json
    """),
    ("evaluate", 1, "", """
        nowhere => there is no checkpoint nowhere
        run --data few.h5 => ... examples of shape (3,); the model was trained on shape (8, 8)
        run --sample 5 --json s.json => --sample writes a text and scores nothing
        run --probabilities => --probabilities are written by --predict
        run --export w.onnx => ... should end in .npz or .safetensors
        run --predict p.txt => --predict p.txt: the name should end in .csv or .npz
        run --predict nowhere/p.csv => --predict nowhere/p.csv cannot be written: there is no such
        run --samples => ... only runs of train-sgld have samples
        run --samples --sample 3 => --sample N writes a text, --samples scores what train-sgld has drawn
    """),
    ("export_metrics", 1, "", """
        => name the folder of a run, or one with runs below it
        nowhere => nowhere is not there
        bad.h5 => bad.h5 is a file, not the folder of a run
        run --out a.txt => --out a.txt: the name should end in .csv
        run --out bad.h5/a.csv => bad.h5/a.csv cannot be written
        run --out /proc/a.csv => /proc/a.csv cannot be written: No such file or directory
        run --to parquet => --to: expected one of 'csv', 'tensorboard', not parquet
        run --out run/ => ... run: the name should end in .csv
        begun => begun/metrics.jsonl cannot be read: No such file or directory
    """),
    ("hardware", 1, "", """
        --parts machine,memroy => unknown part 'memroy'
        --seconds 0 => --seconds must be greater than 0, not 0
        --seconds nan => --seconds: expected a number, not nan
        --batch-size 0 --roofline mlp => --batch-size must be greater than 0
        --size 12 => --size is 1KiB or more, not 12
        --size 4kb => --sizes: write 64KiB, 4MiB, 1GiB or a number of bytes, not '4kb'
        --roofline mlp --parts machine => --roofline and --run need the parts arithmetic and memory
        --run nowhere => --run nowhere: summary.json cannot be read
        --json nowhere/h.json => --json nowhere/h.json cannot be written
        --json h.txt => --json h.txt: the name should end in .json
        --roofline mlp --plot nowhere/p => --plot nowhere/p.png cannot be written
        --roofline mlq => unknown model 'mlq'
        --roofline svm => model 'svm' is for 2 classes, the data has 10; use softmax or
        --roofline mlp --data digit => unknown data set 'digit'
        --device gpu => --device: expected one of 'cpu', 'cuda', not gpu (did you mean
    """),
    ("hardware", 2, "", """
        => hardware measures one machine; start it without mpiexec
    """),
    ("hardware", 1, "--seconds 0.0001", """
        --device cuda => device cuda cannot be used: CuPy is missing (No module named
    """),
    ("report", 1, "", """
        => the following arguments are required: folders
        none => none: there is no such folder
        run empty => empty: there is no run in or below it: a run's folder holds config.yaml
        run --out a/b.html => --out a/b.html cannot be written: there is no such folder
        run --out mine.html => --out mine.html is there, and no report has written it
        run --picture-format pdf => --picture-format: expected one of
        run --picture a => unrecognized arguments: --picture a (did you mean '--pictures'?)
    """),
    ("search", 1, "", """
        --data few.h5 --space lr=log:0.001..0.5 --trials 3 --out s => the program that trains comes first
        train-alreduce --space lr=log:0.001..0.5 --trials 3 --out s => \
            unknown program 'train-alreduce' (did you mean 'train-allreduce'?)
        train-allreduce --steps 9 --method asha --space lr=log:0.001..0.5 --trials 3 --out s => \
            --method asha counts in epochs
        train-kmeans --space lr=log:0.001..0.5 --trials 3 --out s => \
            train-kmeans trains by no strategy that can be run beside others
        '-n 2: train-allreduce' --space lr=log:0.001..0.5 --trials 3 --out s => \
            a trial's ranks are told by --ranks-per-trial, and the program
    """),
    ("search", 1, SEARCH, """
        --resume nowhere => ... there is no run in that folder
    """),
    ("search", 1, f"{SEARCH} --trials 3 --out s", """
        --trials 3 => there is nothing to search: give --space lr=log:0.001..0.5,
        --space lr=log:0..0.5 => --space lr: a logarithmic range begins above 0, not at 0
        --space lr=0.5..0.1 => --space lr: the range from 0.5 to 0.1 is empty
        --space lr=-1..0.5 => --space lr=-1.0: --lr must be greater than 0
        --space 'optimizer=adam|addam' => --space optimizer=addam: unknown optimizer 'addam' (did you mean 'adam'?)
        --space 'model=mlp:8|mpl:8' => --space model=mpl:8: unknown model 'mpl'
        --space 'optimizer=sgd|momentum' --space 'momentum:betta=0.5..0.9 if optimizer=momentum' => \
            --space optimizer=momentum: optimizer 'momentum' has no setting
    """),
    ("search", 1, f"{SEARCH} --trials 3 --out s --space lr=log:0.001..0.5", """
        --space lrr=0.1..1 => --space lrr: train-allreduce has no option --lrr (did you mean 'lr'?)
        --space seed=int:0..9 => ... the search itself decides --seed
        --objective test_acuracy => unknown objective 'test_acuracy' (did you mean 'test_accuracy'?)
        --objective test_rmse => unknown objective 'test_rmse'
        --method ransom => unknown method 'ransom' (did you mean 'random'?)
        --trials -1 => --trials is 0 or more, not -1
        --method asha --space epochs=int:2..5 => ... --method asha decides how long a trial is
        --method asha --least 9 => the shortest piece of a trial, 9 epochs, should lie above 0 and
        --most 2.5 => --most: a whole trial has a whole number of epochs, not 2.5
        --ranks-per-trial 3 => --ranks-per-trial 3: there
        --controller own => --ranks-per-trial 1: there are 0 ranks beside the one of
        --seeds 0 => --seeds is 1 or more, not 0
        --out none => --out none: a search is made of what its trials have written;
        --out /proc/nothing => --out /proc/nothing cannot be written: No such file or directory
        --data nowhere.h5 => data file 'nowhere.h5' does not exist
        --topology ring => --space lr=0.001: unrecognized arguments: --topology ring (an
        --space-file nowhere.yaml => --space-file nowhere.yaml cannot be read
    """),
    ("supervise", 1, "", """
        --restarts 3 => there is no job: hpcdl supervise --restarts 3 -- mpiexec -n 4
        --restarts -1 -- hpcdl => --restarts is 0 or more, not -1
        --stalled -1 -- hpcdl => --stalled is 0 to
        --retries 3 -- hpcdl => unrecognized arguments: --retries
        -- nompi -n 2 hpcdl train-svrg --out a => nompi cannot be started: No such file
    """),
    ("train_allreduce", 2, "", """
        --inject kill:rank=2 => --inject kill:rank=2: the ranks are 0 to 1, and there is no rank 2
    """),
    ("train_allreduce", 1, "--out a", """
        --allreduce rings => \
            unknown all-reduce algorithm 'rings' (did you mean 'ring'?); known: auto, direct, hierarchical,
        --model mlq => unknown model 'mlq' (did you mean 'mlp'?); known: gpt, linear, logistic, mlp, softmax
        --data digit => unknown data set 'digit' (did you mean 'digits'?); known: digits
        --lr -0.1 => --lr must be greater than 0, not -0.1
        --batch-size 0 => --batch-size must be greater than 0
        --overlap --bucket-mib 0 => --bucket-mib must be greater than 0
        --out /proc/run => --out /proc/run cannot be written
        --lr half => --lr: expected a number, not half
        --accumulate 999999999999999999 => \
            --accumulate 999999999999999999: a batch has 32 examples, and so many parts at most
        --accumulate 99999999999999999999 => --accumulate: expected a whole number of 64 bits, not 99999999999999999999
        --partition shards:999999999 => partition 'shards:999999999': there are 1438 training examples
        --model mlp:99999999999 => \
            --model mlp:99999999999, of 7,499,999,999,935 parameters, on each rank needs ... bytes at least
        --model gpt:layers=99999999 => ... 'gpt:layers=99999999', by the number of its layers, needs 999,999,990,000
        --pretend-compute 1e308 => --pretend-compute is 1,000,000,000 at most
        --straggler 0:inf => --straggler is RANK:FACTOR or random:PROBABILITY:FACTOR, not '0:inf'
        --allreduce ..:x => --allreduce ..:x should be an importable package.module:name
        --out {x*5000} => --out {x*594} ... {x*562} cannot be written: File name too long
        --data {x*5000} => ... cannot be read: File name too long
        --data bad.h5 => bad.h5 is not an HDF5 file; prepare_data makes one from idx,
        --lr 1 --nonsense => unrecognized arguments: --nonsense
    """),
    ("train_allreduce", 1, "--out none", """
        --respawn => --respawn starts anew what --survive outlives: say how many ranks may be lost
        --survive 1 => \
            ... ends all ranks when one is gone; it needs Open MPI from 5.0 on, started with mpiexec --with-ft
        --model torch:torch_nets:lazy => ... gets its shape from the first batch
        --model torch:torch_nets:raising => ... ValueError: no such width (torch_nets.py, line
        --model torch:torch_nets:absent => --model torch:torch_nets:absent should be an importable
        --model torch:nowhere:make => --model torch:nowhere:make should be an importable
        --model torch:cnn => ... should be an importable package.module:name
        --model torch:cnn:make,width=4,hidden=16,kernel=3,depth=3 => \
            ... there is no setting 'depth'; it takes features, classes, width
        --model torch:cnn:make,width=4,hidden=16,kernel=3,buffers=none => ... unknown way with buffers 'none'
        --model mlp:8 --dtype bfloat16 => --dtype bfloat16 is for a module of PyTorch's (--model
    """),
    ("train_apex", 1, f"{CHAIN} --model mlp:8 --replay 200 --chunk 4 --evaluate-every 100", """
        => no actors are left over: 1 learner, 1 replay of 1 rank; start at least 3 ranks
        --learners 0 => --learners must be greater than 0
        --replays -1 => --replays must not be negative, and is -1
        --chunk 0 => --chunk must be greater than 0
        --broadcast-every 0 => --broadcast-every must be greater than 0
        --epsilon-alpha nan => --epsilon-alpha: expected a number, not nan
        --resume nowhere => --resume nowhere: there is no run in that folder (config.yaml
    """),
    ("train_apex", 3, f"{CHAIN} --model mlp:8 --replay 200 --chunk 4 --evaluate-every 100", """
        --learners 2 => no actors are left over: 2 learners, 1 replay of 3 ranks
        --env nothing:here => ... No module named 'nothing'
        --model softmax => --model softmax: action values are those of mlp:128,128
        --env-options size=3 => ... size
        --resume nowhere => --resume nowhere: there is no run in that folder
    """),
    ("train_apex", 4, f"{CHAIN} --model mlp:8 --replay 200 --chunk 4 --evaluate-every 100", """
        --learners 2 --replays 0 --batch-size 1 => --batch-size 1: 2 learners share it
        --learners 2 --replays 0 --replay 200 --learning-starts 195 => \
            ... the replay memories of 2 ranks never hold more
        --actors 1 => --actors 1, --learners 1 and --replays 1 are 3 ranks, not 4
        --replays 2 => 2 ranks that remember need as many actors
    """),
    ("train_coordinate_descent", 1, "--data two.h5 --model logistic --out a --weight-decay 0.05", """
        --weight-decay 0 => --weight-decay must be greater than 0, and is 0.0
        --weight-decay 0 --l1 0.1 => --weight-decay must be greater than 0 (with --l1, too: the dual
        --l1 -1 => --l1 must not be negative, and is -1.0
        --tolerance -1 => --tolerance must not be negative, and is -1.0
        --rounds 0 => --rounds must be greater than 0, not 0
        --threads 0 => --threads must be greater than 0, not 0
        --threads 5000 => --threads is 1,024 at most, not 5000
        --local-steps 0 => --local-steps must be greater than 0, not 0.0
        --local-steps 1e7 => --local-steps is 1,000,000 at most, not 10000000.0
        --aggregate mean => --aggregate: expected one of 'add', 'average', not mean
        --locking no => --locking: expected one of 'atomic', 'none', not no
        --device cuda => --device cuda: coordinate descent is for CPUs
        --placement streamed => each rank goes through rows in its memory: --placement shared or partitioned
        --data-servers 1 => each rank goes through rows in its memory: --placement shared or partitioned
        --lr 1 => --lr has no meaning where single coordinates are solved for: leave it out
        --optimizer adam => --optimizer has no meaning where single coordinates are solved for: leave it out
        --schedule 1/t => --schedule has no meaning where single coordinates are solved for: leave it out
        --epochs 3 => --epochs has no meaning where single coordinates are solved for: leave it out
        --steps 3 => --steps has no meaning where single coordinates are solved for: leave it out
        --batch-size 8 => --batch-size has no meaning where single coordinates are solved for: leave it out
        --batch-per-rank 8 => --batch-per-rank has no meaning where single coordinates are solved for: leave it out
        --clip-norm 1 => --clip-norm has no meaning where single coordinates are solved for: leave it out
        --accumulate 2 => --accumulate has no meaning where single coordinates are solved for: leave it out
        --average from=1 => --average has no meaning where single coordinates are solved for: leave it out
        --augment flip => --augment has no meaning where single coordinates are solved for: leave it out
        --straggler 0:2 => --straggler has no meaning where single coordinates are solved for: leave it out
        --pretend-compute 1 => --pretend-compute has no meaning where single coordinates are solved for: leave it out
    """),
    ("train_coordinate_descent", 2, "--data two.h5 --model logistic --out a --weight-decay 0.05", """
        --model softmax => train-coordinate-descent works on the coordinates of linear models: take --model linear,
        --weight-decay -1 => --weight-decay must
    """),
    ("train_dqn", 1, f"{CHAIN} --model mlp:8,dueling --replay 200 --evaluate-every 100", """
        --env nothing:here => --env nothing:here should be an importable package.module:name:
        --env-options size => --env-options size: a setting is written NAME=VALUE, not 'size'
        --data digits --partition shards:2 => --partition: this program learns in an
        --epochs 3 => --epochs: this program learns in an environment
        --batch-size 300 => --batch-size 300: the replay memory never holds
        --learning-starts 199 => --learning-starts 199: the replay memory never holds more than
        --envs 3 --train-every 2 => --train-every 2 and --envs 3: one must be a multiple of the
        --envs 8 --evaluate-every 100 => --evaluate-every 100: it must be a multiple of 8 environment
        --replay 1000000000000000 => --replay 1000000000000000 should be from 5 to 2147483647: each
        --model softmax => --model softmax: action values are those of mlp:128,128 or
        --epsilon 2 => --epsilon 2: first and last are probabilities, from 0 to 1, and
        --loss hinge => unknown loss 'hinge'; known: huber, squared
        --gamma 1.5 => --gamma is at least 0
        --env-steps 0 => --env-steps must be greater
        --n-step 0 => --n-step must be greater
        --batch-size full => --batch-size: a number
        --double perhaps => --double: expected one of 'yes', 'no', not perhaps
    """),
    ("train_dqn", 2, f"{CHAIN} --model mlp:8,dueling --replay 200 --evaluate-every 100", """
        => this strategy runs on 1 rank, not on 2
    """),
    ("train_ensemble", 1, "", """
        train-nothing --data few.h5 --model softmax --epochs 2 --batch-size 4 --out e => \
            ... unknown program 'train-nothing'
    """),
    ("train_ensemble", 2, "", """
        train-sequential --ranks-per-member 2 --data few.h5 --model softmax --epochs 2 --batch-size 4 --out e => \
            train-sequential --data few.h5 --model softmax --epochs 2
    """),
    ("train_ensemble", 1, "--data few.h5 --model softmax --epochs 2 --batch-size 4 --out e", """
        --members -1 => --members must not be negative
        --ranks-per-member 0 => --ranks-per-member must be greater than 0
        --subspace 0 => --subspace is a fraction, more than 0
        --snapshots 2 --boost samme => --snapshots and --boost: members come from one of them
        --snapshots 2 --bagging => --snapshots trains on all rows, or draws them itself, with all
        --boost samme --combine mean --ranks-per-member 2 => --boost trains on all rows, or draws them itself, with all
        --data penguins.h5 --combine vote => --combine vote is of classes; penguins.h5 has values to
        --data penguins.h5 --boost samme => --boost samme is of classes; penguins.h5 has values to predict,
        --best 2 => --from SEARCH and --best N belong together
        --vary lr => ... say an option once and its values
        --vary 'seed=1|2' => --vary seed: it is the same for all members
        --vary 'modle=mlp|softmax' => ... unrecognized arguments: --modle=mlp
        --combine stacking => --combine stacking is fitted on rows that no member is trained
        --bagging --placement streamed => rows are drawn again (bagging, boosting) with --placement
        --resume nowhere => --resume nowhere: with another out it would be another ensemble
        --vary => --vary needs a value
    """),
    ("train_ensemble", 2, "--data few.h5 --model softmax --epochs 2 --batch-size 4 --out e", """
        --ranks-per-member 3 => --ranks-per-member 3: there are 2 ranks
        --data-servers 1 --ranks-per-member 2 => --data-servers: rows and features are drawn in the memory of
    """),
    ("train_federated", 1, "--out a", """
        --clients 0 => --clients 0 takes the owners of --partition column:NAME
        --clients -1 => --clients must not be negative
        --fraction 0 => --fraction is greater than 0 and at most 1, not 0.0
        --fraction 1.1 => --fraction is greater than 0 and at most 1
        --drop-out 1 => --drop-out is at least 0 and less than 1
        --late=-0.1 => --late is at least 0 and less than 1
        --local-epochs 0 => --local-epochs must be greater than 0
        --local-batch=-1 => --local-batch must not be negative
        --proximal=-1 => --proximal must not be negative
        --rounds 0 => --rounds must be greater than 0
        --rounds-to 85 => --rounds-to is an accuracy from 0 to 1
        --server-lr=-1 => --server-lr must not be negative
        --epochs 3 => --epochs: clients count --rounds, --local-epochs and --local-batch
        --batch-size 64 => --batch-size: clients count
        --steps 9 => --steps: clients count
        --placement partitioned => clients read the rows of --placement shared
        --data-servers 1 => clients read the rows of --placement shared
        --augment shift:1 => clients read the rows of --placement shared
        --clients 2000 => 1438 training examples cannot be divided among 2000 clients
        --server-optimizer rms => unknown optimizer 'rms'; known: adagrad, adam, adamw,
        --partition column:writer --clients 0 => ... no whole number for each row in train/writer
        --noise 1.0 => --noise is in units of --clip: give --clip NORM, too
        --noise=-1.0 --clip 1.0 => --noise must not be negative, and is -1.0
        --clip=-1.0 => --clip is a norm
        --clip 1024.0 => --clip is a norm from 0 to less than 1024, not 1024.0
        --delta 0.0 => --delta is greater than 0
        --delta 1.0 => --delta is greater than 0
        --threshold 0.4 => --threshold is at least 0.5
        --threshold 1.1 => --threshold is at least 0.5
        --secure --late 0.1 => --late: with --secure
        --clip 1.0 --late 0.1 => --late: with --clip
    """),
    ("train_federated", 2, "--out a", """
        --clients 12 --rounds 3 --secure --fraction 0.1 => --secure hides a client among the others of its round; have 2
    """),
    ("train_fully_sharded", 1, "", """
        --survive 1 => ... an option of train-allreduce and train-federated and train-gossip and train-local-sgd
    """),
    ("train_fully_sharded", 1, "--out a", """
        --stage 0 => --stage: expected one of 1, 2, 3, not 0
        --gather scatter => --gather: expected one of 'all-gather', 'broadcast', not scatter
    """),
    ("train_fully_sharded", 2, "--out a", """
        --model mlp:99999999999 => \
            --model mlp:99999999999, of 7,499,999,999,935 parameters, on each rank needs ... bytes at least
    """),
    ("train_gorila", 1, f"{CHAIN} --model mlp:8,dueling --replay 400 --evaluate-every 120 --chunk 2 --sync-every 4", """
        --consistency bsp --actors 1 => --consistency bsp is for bundles
        --servers 0 => --servers must be greater than 0
        --sync-every 0 => --sync-every must be greater than 0
        --chunk 0 => --chunk must be greater than 0
        --actors -1 => --actors must not be negative, and is -1
        --outliers -1 => --outliers must not be negative, and is -1.0
        --max-staleness -1 => --max-staleness must not be negative, and is -1
        --consistency ssp => --consistency: expected one of 'bsp', 'async', not ssp (did you
        --partition shards:2 => --partition: this program learns in an environment
        => no bundles are left over: 1 parameter server of 1 rank; start at least 2 ranks
        --actors 2 => ... 1 parameter server, 1 learner of 1 rank; start at least 4 ranks
    """),
    ("train_gorila", 4, f"{CHAIN} --model mlp:8,dueling --replay 400 --evaluate-every 120 --chunk 2 --sync-every 4", """
        --servers 2 --learners 2 => no actors are left over: 2 parameter servers, 2 learners
        --actors 1 --learners 1 => --actors 1, --learners 1 and 1 parameter server are 3
        --learners 2 => --learners 2: each needs an actor, and there are 1
        --batch-size 390 => --batch-size 390: the replay memories of 3 ranks never hold more than
        --envs 40 => --batch-size 8: the replay memories of 3 ranks never hold more
        --learning-starts 390 => --learning-starts 390: the replay memories of 3 ranks never hold
        --consistency bsp --evaluate-every 2 => --evaluate-every must be at least 3 environment steps, a step
        --replay 1099511627776 => --replay 366503875926 should be from 5 to 2147483647: each of 1
        --env refusedchains:nothing => --env refusedchains:nothing should be an importable
    """),
    ("train_gossip", 1, "--out a", """
        --draw graph.nothing => cannot draw into graph.nothing: end its name with .png, .svg or
    """),
    ("train_gossip", 3, "--out a", """
        --topology hypercube => a hypercube has a power of two of ranks, not 3
        --topology pieces.edges => ... no path leads from rank 0 to rank 2
        --method defacto --topology one-peer => no exact averaging in factors on 3 ranks: one-peer averages
    """),
    ("train_gossip", 4, "--out a", """
        --topology far.edges => far.edges, line 1: there is no rank 7 of 4
        --topology heavy.edges => mixing matrix: row 1 gives rank 1 the weight -0.4
        --topology rings => unknown topology 'rings' (did you mean 'ring'?); known:
        --topology absent/file => cannot read the edges in absent/file: No such file or directory
        --method detag --topology one-peer => detag's gossip is accelerated on one graph
        --method adpsgd --topology one-peer => adpsgd averages in pairs, and the edges of one-peer go one way;
        --method adpsgd --phase 3 => ... leave out --mixing and --phase
        --method dpsgd --phase 3 => dpsgd has no phases: leave out the number of its batches
        --phase -1 => --phase must not be negative, and is -1
        --mixing any => --mixing: expected one of 'metropolis-hastings', 'uniform', not
    """),
    ("train_grid", 1, "--data digits", """
        --schedule interleaved --model mlp:5,5 --grid pipeline=1 => the schedule interleaved needs at least 2 stages
    """),
    ("train_grid", 2, "--data digits", """
        --schedule interleaved --chunks 2 --model mlp:5,5 --grid pipeline=2 => \
            4 stages need as many layers, and the model has 3
        --schedule interleaved --microbatches 3 --model mlp:5,5 --grid pipeline=2 => \
            2 interleaved stages need a multiple of 2
        --schedule interleaved --microbatches 1 --model mlp:5,5 --grid pipeline=2 => \
            2 interleaved stages need a multiple of 2
        --microbatches 0 --model mlp:5,5 --grid pipeline=2 => a pipeline needs at least 1 micro-batch, not 0
        --chunks 2 --model mlp:5,5,5 --grid pipeline=2 => \
            the schedule 1f1b has 1 chunk per stage, not 2; take interleaved
        --accumulate 2 --model mlp:5,5 --grid pipeline=2 => --accumulate: a pipeline cuts its batches by --microbatches
        --schedule pipedeam --model mlp:5,5 --grid pipeline=2 => \
            unknown pipeline schedule 'pipedeam' (did you mean 'pipedream'?)
    """),
    ("train_grid", 4, "--data digits", """
        --model mlp:5,5 --grid pipeline=4 => \
            4 stages need as many layers, and the model has 3 (dense1, dense2, dense3); take
    """),
    ("train_grid", 1, "--out a", """
        --schedule constant => --schedule constant: here it is the pipeline's; write --lr-schedule
        --schedule pipedream => --schedule pipedream updates each stage by itself: train-pipeline
        --stage 4 => --stage is 0, 1, 2 or 3, not 4
        --stage -1 => --stage is 0, 1, 2 or 3, not -1
    """),
    ("train_grid", 2, "--out a", """
        --grid data=2,tensor=2 => grid data=2,pipeline=1,tensor=2 has 4 ranks, and there are 2
    """),
    ("train_hogwild", 1, "--out a", """
        --threads 0 => --threads must be greater than 0, not 0
        --threads 5000 => --threads is 1024 at most, not 5000
        --join-every 0 => --join-every must be greater than 0, not 0
        --round-size=-1 => --round-size must not be negative, and is -1
        --exchange-every=-1 => --exchange-every must not be negative
        --exchange-every 9 --locking striped => ... exchange loses nothing; take none
        --optimizer momentum => --optimizer momentum: it moves coordinates that no example
        --device cuda => --device cuda: threads work on the cores of the processor;
        --placement streamed => --placement streamed: threads need the rows in memory; take
        --data-servers 1 => --data-servers: threads take whole examples one by one from
        --clip-norm 1.0 => --clip-norm: threads take whole examples one by one from
        --augment flip => --augment: threads take whole examples one by one from memory;
        --average 1 => --average 1: say with which epoch the mean of the parameters
        --batch-size full => --batch-size: expected a whole number, not full
        --servers 1 => --servers goes with --join servers
        --join servers --shared => --join servers: each worker has a vector of its own; leave out
        --join servers --join-every 2 => --join servers: a worker pushes after each round; for fewer
        --join servers --optimizer adagrad => --join servers adds up what workers change, who have no state
        --join servers --partition by-label => --join servers: any worker may have to do any round; take
        --model mlp:8 => ... take --model linear, logistic, svm or softmax
        --join rings => --join: expected one of 'all-reduce', 'gossip', 'servers', not
        --join servers => no worker is left over: 1 parameter server of 1 rank; start at
        --exchange-every 64 --locking round-robin => ... exchange loses nothing; take none
    """),
    ("train_kmeans", 1, "", """
        --servers 2 --clusters 1 => --servers 2 cannot share 1 cluster
        --consistency async => Lloyd's algorithm goes in rounds: for async choose a --batch-size
        --consistency ssp --staleness 1 => Lloyd's algorithm goes in rounds: for ssp choose a --batch-size
        --staleness 2 --batch-size 5 => a staleness of 2 is for ssp; bsp has no bound: take 0
        --rounds 0 => --rounds must be greater than 0
        --batch-size=-1 => --batch-size must not be negative
        --out a.txt => --out a.txt: the name should end in .npz
    """),
    ("train_kmeans", 2, "", """
        --data same.h5 --clusters 3 => ... the training rows have only 2 different values
    """),
    ("train_kmeans", 4, "", """
        --clusters 1439 => --clusters 1439: digits has 1438 training rows
        --servers 4 => no worker is left over: 4 parameter servers of 4 ranks; start at least 5
    """),
    ("train_local_sgd", 1, "--out a", """
        --sync-every 0 => --sync-every must be greater than 0, not 0
        --sync-every 1.5 => --sync-every: expected a whole number, not 1.5
        --local-from -1 => --local-from must not be negative, and is -1
        --outer newton => unknown outer rule 'newton'; known: adagrad, adam, adamw, average, momentum,
        --outer momentum:beta=1 => the momentum's beta is at least 0 and less than 1, not 1.0
        --outer sgd --outer-lr 0 => --outer-lr must be greater than 0, not 0.0
        --outer sgd --outer-lr -1 => --outer-lr must be greater than 0, not -1.0
        --outer-lr 0.7 => --outer average has no learning rate: leave out --outer-lr, or add --outer sgd
        --local-momentum drop => --local-momentum: expected one of 'keep', 'average', 'reset', not drop
        --local-momentum reset --optimizer sgd => --local-momentum reset: --optimizer sgd has none
    """),
    ("train_local_sgd", 2, "--out a", """
        --outer newton => unknown outer rule 'newton'; known: adagrad, adam, adamw,
    """),
    ("train_model_parallel", 1, "--out a", """
        --balance time => --balance: expected one of 'parameters', 'measured', not time
        --schedule 1f1b --microbatches 4 => unrecognized arguments: --microbatches 4
    """),
    ("train_parameter_server", 1, "--out a", """
        --servers 0 => a parameter store needs at least one server, not 0
        --servers 3 --servers-on-workers => give --servers or --servers-on-workers, not both: there, every
        --servers -1 => --servers must not be negative, and is -1
        --servers 9 => no worker is left over: 9 parameter servers of 1 rank; start at
        --consistency ssp --staleness -1 => ... number of clocks, at least 0, not -1
        --staleness 2 => a staleness of 2 is for ssp; bsp has no bound
        --consistency async --staleness 2 => a staleness of 2 is for ssp; async has no bound
        --consistency asink => --consistency: expected one of 'bsp', 'ssp', 'async', not asink
        --broadcast-every -1 => --broadcast-every must not be negative
        --fixed-delay -1 => --fixed-delay must not be negative
        --fixed-delay 2 --checkpoint-every 5 => --fixed-delay: what is delayed is in no checkpoint; leave out
        --consistency async --placement partitioned => async draws batches of all rows
        --consistency async --partition by-label => async draws batches of all rows
        --servers-on-workers --device cuda => --servers-on-workers keeps slices in the memory of the host;
        --sparse-push --device cuda => ... in the memory of the host: leave out --device
        --sparse-push --broadcast-every 1 => ... leave it out with --sparse-push
    """),
    ("train_parameter_server", 3, "--out a", """
        --broadcast-every 2 => servers that send after every 2 clocks need workers that may be
        --consistency ssp --staleness 1 --broadcast-every 3 => \
            servers that send after every 3 clocks need workers that may be
        --fixed-delay 2 --consistency ssp --staleness 3 => a fixed delay is a number of versions, for bsp and async
    """),
    ("train_parameter_server", 4, "--out a", """
        --servers 4 => no worker is left over: 4 parameter servers of 4 ranks; start at least 5 ranks
        --servers 3 --data narrow.h5 --model logistic => 3 servers cannot share 2 parameters
        --servers 2 --straggler 1:3 => ... rank 1 is no worker; the workers are ranks 2 to 3
    """),
    ("train_parameter_server", 1, "--out none", """
        --servers 2 --replicas 3 => 3 replicas of each slice need 3 servers, not 2
        --servers 2 --replicas 0 => ... each slice is on 1 server or more
        --servers 2 --survive 1 => --survive: what a server holds would be gone with it; give
        --servers 2 --replicas 2 --fixed-delay 1 => --replicas 2: --fixed-delay has no replicas of its slices;
    """),
    ("train_parameter_server", 3, "--out none", """
        --servers 2 --replicas 2 --clip-norm 1 => --replicas: the norm of a round's sum is known to all servers
        --servers 2 --replicas 2 --average from=1 => --replicas: the mean of the iterates has no replicas; leave out
        --servers 2 --replicas 2 --survive 1 => ... it needs Open MPI from 5.0 on, started with
    """),
    ("train_pipeline", 1, "", """
        --survive 1 => ... an option of train-allreduce and train-federated and train-gossip and train-local-sgd
    """),
    ("train_pipeline", 1, "--data digits", """
        --schedule interleaved --model mlp:5,5 => the schedule interleaved needs at least 2 stages
    """),
    ("train_pipeline", 2, "--data digits", """
        --schedule interleaved --chunks 2 --model mlp:5,5 => 4 stages need as many layers, and the model has 3
        --schedule interleaved --microbatches 3 --model mlp:5,5 => 2 interleaved stages need a multiple of 2
        --schedule interleaved --microbatches 1 --model mlp:5,5 => 2 interleaved stages need a multiple of 2
        --microbatches 0 --model mlp:5,5 => a pipeline needs at least 1 micro-batch, not 0
        --chunks 2 --model mlp:5,5,5 => the schedule 1f1b has 1 chunk per stage, not 2; take interleaved
        --accumulate 2 --model mlp:5,5 => --accumulate: a pipeline cuts its batches by --microbatches
        --schedule pipedream --clip-norm 1 --model mlp:5,5 => --schedule pipedream: no stage waits for
        --schedule pipedeam --model mlp:5,5 => unknown pipeline schedule 'pipedeam' (did you mean 'pipedream'?)
    """),
    ("train_pipeline", 4, "--data digits", """
        --model mlp:5,5 => 4 stages need as many layers, and the model has 3 (dense1, dense2, dense3); take
    """),
    ("train_pipeline", 2, "--data text.h5", """
        --schedule pipedream --model gpt:layers=2,width=8,heads=2,head=tied => \
            --schedule pipedream: the first and the last stage
    """),
    ("train_pipeline", 1, "--out a", """
        --schedule cosine => --schedule cosine: here it is the pipeline's; write --lr-schedule
        --schedule step:every=3 => --schedule step:every=3: here it is the pipeline's; write --lr-
        --balance evenly => --balance: expected one of 'parameters', 'measured', not evenly
    """),
    ("train_pipeline", 2, "--out a", """
        --microbatches 9999999 => --microbatches 9999999: a batch has 32 examples
    """),
    ("train_pipeline", 3, "--out a", """
        --model mlp:8 => 3 stages need as many layers, and the model has 2 (dense1, dense2);
    """),
    ("train_sequential", 1, "", """
        --lr -1 => --lr must be greater than 0, not -1
        --lr inf => --lr: expected a number, not inf
        --time-limit nan => --time-limit: expected a number, not nan
        --lr => argument --lr: expected one argument
        --standardize=maybe => --standardize: expected one of 'auto', 'yes', 'no', not maybe
        --batch_size=8 => unrecognized arguments: --batch_size=8 (did you mean '--batch-size'?)
        --epoch 3 => unrecognized arguments: --epoch 3 (did you mean '--epochs'?)
        --lr fast => --lr: expected a number, not fast
        --batch-size 0 => --batch-size must be greater than 0, not 0
        --batch-size some => --batch-size: a number of examples, or full, not 'some'
        --batch-per-rank -2 => --batch-per-rank must not be negative
        --epochs 0 => --epochs must be greater than 0
        --epochs 1.5 => --epochs: expected a whole number, not 1.5
        --dtype float16 => --dtype: expected one of 'float32', 'float64', 'bfloat16', not float16 (did you
        --placement sharde => ... not sharde (did you mean 'shared'?)
        --learning-rate 1 => unrecognized arguments: --learning-rate 1 (did you mean '--lr'?)
        --overlap => unrecognized arguments: --overlap (an option of train-allreduce)
        --placement cloud => --placement: expected one of 'shared', 'partitioned', 'streamed', not cloud
        --validation 1 => --validation is a fraction, at least 0 and less than 1, not 1.0
        --patience 3 => --patience looks at the validation loss; add --validation
        --nonsense 3 => unrecognized arguments: --nonsense 3
        --config no.yaml => --config no.yaml cannot be read: No such file or directory
        --resume nowhere => --resume nowhere: there is no run in that folder
        --device tpu => --device: expected one of 'cpu', 'cuda', not tpu
    """),
    ("train_sequential", 2, "", """
        => this strategy runs on 1 rank, not on 2
    """),
    ("train_sgld", 1, "--out a", """
        --optimizer momentum => --optimizer momentum: a step of Langevin dynamics is a plain one; take sgd
        --weight-decay 0.1 => --weight-decay: the prior is --prior-precision
        --clip-norm 1 => --clip-norm: clipped gradients are those of another posterior
        --augment flip => --augment: examples that change are more than there are
        --prior-precision -1 => --prior-precision must not be negative, and is -1.0
        --noise-variance 0 => --noise-variance must be greater than 0, not 0.0
        --burn-in -1 => --burn-in must not be negative, and is -1
        --thin -1 => --thin must not be negative, and is -1
        --chains 0 => --chains must be 1 or more, not 0
        --chains 2 --partition by-label => --chains read all rows, each in an order of its own
        --chains 2 --placement partitioned => --chains read all rows, each in an order of its own
        --schedule polynomial:b=0 => the schedule's b is positive, not 0.0
        --noise-variance 2 => --noise-variance is of a regression; classes have none
        --thin 1 --epochs 30 => 1125 samples of a chain are too many, 1000 are kept at most: --thin 2 or
        --data two.h5 --model svm => the hinge loss is no log-likelihood: take --model logistic
    """),
    ("train_sgld", 2, "--out a", """
        --chains 3 => --chains 3: each has a rank at least, and there are 2
    """),
    ("train_svrg", 1, "", """
        --survive 1 => ... an option of train-allreduce and train-federated and train-gossip and train-local-sgd
    """),
    ("train_svrg", 1, "--out a", """
        --optimizer adam => --optimizer adam: steps of reduced variance are plain ones; take sgd
        --inner-epochs 0 => --inner-epochs must be greater than 0, not 0.0
        --clip-norm 1 => --clip-norm: a clipped step is none of reduced variance
        --augment flip => --augment: an example that changes has no gradient that could be kept
        --method sag => --method: expected one of 'svrg', 'saga', not sag
        --method saga --inner-epochs 1 => --method saga takes no snapshots: leave out --inner-epochs
        --method saga --threads 2 => --method saga takes no snapshots: leave out --inner-epochs
        --method saga --device cuda => --method saga works on single examples, on the CPU
        --method saga --accumulate 2 => --method saga has no parts of a batch to add up
        --threads 2 --straggler 0:2 => --threads calls no model that could be slowed
        --threads -1 => --threads must not be negative, and is -1
        --threads 2000 => --threads is 1024 at most, not 2000
        --threads 2 --snapshot random => --threads: no iterate can be drawn where nobody sees each
        --threads 2 --inner-epochs 1.5 => --threads meet at the ends of epochs: --inner-epochs is whole
        --threads 2 --batch-size 16 => --threads take steps of one example: leave out --batch-size
        --threads 2 --device cuda => --threads works on single examples, on the CPU
        --threads 2 --placement streamed => --threads read rows in memory: --placement shared
        --threads 1 => --threads works on the coordinates of linear models: take --model
    """),
    ("train_svrg", 2, "--out a", """
        --threads 2 --model softmax => --threads share the parameters of one rank, not of 2
        --method saga => --method saga works on the coordinates of linear models: take --model
    """),
    ("train_tensor_parallel", 2, "--data digits", """
        --model mlp:7 => a hidden layer's width 7 cannot be divided evenly among 2 ranks; choose
        --model mlp:8 --sequence-parallel => sequence parallelism shares the tokens of sequences: it needs a model gpt
    """),
    ("train_tensor_parallel", 3, "--data text.h5", """
        --model gpt:heads=4,width=12 => heads 4 cannot be divided evenly among 3 ranks; choose
    """),
    ("train_tensor_parallel", 4, "--data text.h5", """
        --model gpt:heads=4,width=8 --sequence-parallel => 4 ranks cannot share sequences of 10 tokens evenly
    """),
    ("train_tensor_parallel", 2, "--data two.h5", """
        --model logistic => Logistic has outputs that ranks cannot share; add
    """),
    ("train_tensor_parallel", 1, "--out a", """
        --sequence-parallel 3 => unrecognized arguments: 3
    """),
    ("train_tensor_parallel", 2, "--out a", """
        --placement partitioned => --placement partitioned: ranks that share a model
    """),
    ("watch", 1, "", """
        => name the folder of a run, or one with runs below it
        nowhere => nowhere is not there
        run/config.yaml => run/config.yaml is a file, not the folder of a run
        empty => empty is no run's folder (metrics.jsonl is missing), and there is none below it
        run --every 0 => --every is a number of seconds, 0.1 to 86,400, not 0
        run --every soon => --every: expected a number, not soon
        run --evry 1 => ... did you mean '--every'?
    """),
]
# fmt: on


def repeated(text):
    return re.sub(r"\{(.)\*(\d+)\}", lambda found: found[1] * int(found[2]), text)


def cases():
    """Of each line: a name, program, ranks, arguments, and a pattern for the message."""
    for program, ranks, given, lines in REFUSALS:
        for line in filter(None, map(str.strip, lines.splitlines())):
            more, message = map(repeated, map(str.strip, re.split("(?:^| )=> ", line)))
            words = ".*".join(map(re.escape, re.split(r" ?\.\.\. ?", message)))
            yield f"{program} {more}"[:120], program, ranks, shlex.split(f"{given} {more}"), words
