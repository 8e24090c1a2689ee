"""What the programs refuse: one table, which tests/scripts/test_refusals.py runs.

A block has a program, its number of ranks, the arguments of each of its lines, and lines

    more arguments => the beginning of the message

where `...` stands for any text, also for a number that depends on the machine, and {x*90} for 90 times x. Programs
start in the folder that tests/refused_folder.py writes; one rank is this process."""

import re
import shlex

SEARCH = "train-allreduce --data few.h5 --model softmax --epochs 4 --batch-size 4 --validation 0.3"
CHAIN = "--env refusedchains:chain --learning-starts 20 --batch-size 8 --episodes 2 --seed 3 --train-every 1 --out r"
# fmt: off
REFUSALS = [
    ("bench_allreduce", 1, "", """
        --sizes 4kb => --sizes: write 64KiB, 4MiB, 1GiB or a number of bytes, not '4kb'
        --beside 1 => --beside is for runs that this program starts; give --ranks, too, as in --ranks 2,4
        --ranks 2,x => --ranks: whole numbers above 0 with commas between, not '2,x'
        --ranks 2 --beside x => --beside: whole numbers with commas between, not 'x'
        --algorithms rong => unknown all-reduce algorithm 'rong' (did you mean 'ring'?);
    """),
    ("bench_batch_size", 1, "", """
        --batches 10,x => --batches: whole numbers above 0 with commas between, not '10,x'
        --seeds 0 => --seeds must be greater than 0
    """),
    ("bench_checkpoint", 2, "", """
        --folder nowhere => --folder nowhere: there is no such folder
    """),
    ("bench_gossip", 1, "", """
        --at 1,0 => --at: whole numbers above 0
    """),
    ("bench_gossip", 3, "", """
        --topologies ring,hypercube => a hypercube has a power of two of ranks, not 3
        --topologies one-peer => detag needs a graph that stays the same, but one-peer
    """),
    ("bench_hogwild", 1, "", """
        --locking some => unknown locking 'some'; known: atomic, global, none, round-robin
        --data small:row=9 => shape of synthetic rows 'small' has no setting 'row'; write
        --data small:test=0 => --data small:test=0 has no test rows, whose loss is
        --exchange-every 0 => --exchange-every: whole numbers above 0 with commas between, not '0'
        --round-size -1 => --round-size must not be negative, and is -1
    """),
    ("bench_kernels", 1, "", """
        --kernels momentun => unknown kernel 'momentun' (did you mean 'momentum'?); known:
        --dtype float16 => --dtype is float32 or float64, not float16
    """),
    ("bench_kernels", 2, "", """
        => bench-kernels runs on 1 rank, not on 2: start it without mpiexec
    """),
    ("bench_model_parallel", 1, "--data digits --steps 2", """
        --case idle => --case idle: a pipeline of 1 stage is never idle; start 2 ranks
    """),
    ("bench_model_parallel", 2, "--data digits --steps 2", """
        --microbatches 0 => --microbatches: whole numbers above 0 with commas between, not '0'
    """),
    ("bench_replay", 1, "", """
        --batch-size 9 --capacity 8 => ... should be --capacity 8 at most
        --turns 0 => --turns must be greater than 0
        --capacity 10 --batch-size 2 => --replay 10 should be from 40
    """),
    ("bench_replay", 2, "", """
        => bench-replay runs on 1 rank, not on 2: start it without mpiexec
    """),
    ("bench_search", 1, "", """
        --controller own => --ranks-per-trial 1: there are 0 ranks beside rank 0,
        --spread -1 => --spread is a number from 0 to less than 10, not -1.0
    """),
    ("bench_sklearn", 1, "", """
        --seeds 0 => --seeds must be greater than 0
    """),
    ("bench_svrg", 2, "", """
        --model mlp => bench-svrg works on the coordinates of linear models
    """),
    ("checkpoint", 1, "", """
        pack nowhere => there is no file or folder nowhere
        verify . => there is no checkpoint in .
        show bad.h5 --out b.h5 => --out is an option of pack; show writes nothing
        pack bad.h5 --out nowhere/b.h5 => --out nowhere/b.h5 cannot be written
        look bad.h5 => ... expected one of 'show', 'verify', 'pack', not look
        show => the following arguments are required: run
    """),
    ("compare", 1, "", """
        --out c => there is nothing to compare: give lines, as "train-allreduce"
        train-alreduce 'train-gossip --topologie ring' --out c => line 1, 'train-alreduce': unknown program
        train-allreduce --seeds 1,2,1 --out c => --seeds: 1 is given twice; each seed counts once
        train-allreduce --seeds 0 --out c => --seeds: the number of seeds, or seeds with commas between, not '0'
        train-allreduce --seeds 99999999999 --out c => --seeds 99999999999: there are at most 10,000 seeds
        train-allreduce --seeds 3,99999999999999999999 --out c => ... a seed is a whole number of 64 bits
        train-allreduce --seed 3 --out c => --seed is an option of one run; a comparison takes --seeds
        train-allreduce --target acuracy=0.9 --out c => --target acuracy=0.9: there is no score 'acuracy' (did you
        train-allreduce --budget second=9 --out c => --budget second=9: there is no 'second' (did you mean
        train-allreduce --columns losses --out c => unknown column 'losses'; known: bytes_per_rank,
        train-allreduce --out none => --out none: a comparison reads the files of its runs;
        train-allreduce --resume nowhere --out c => ... there is no run in that folder
        train-allreduce --out /proc/nothing => --out /proc/nothing cannot be written: No such file or directory
        --config line.yaml --out c => --config line.yaml: there is no option 'line' (did you mean
    """),
    ("data", 1, "", """
        show nowhere.h5 => data file 'nowhere.h5' does not exist
        verify . => data '.' is a folder without index.json; give an HDF5 file or a folder of shards
        look digits => ... expected one of 'show', 'verify', not look
        show digits --rows -1 => --rows must not be negative, and is -1
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
        run --sample -1 => --sample must not be negative, and is -1
        run --sample 5 --temperature -0.5 => --temperature must not be negative, and is -0.5
        run --prompt a => --prompt begins a text; add --sample N
        run --threshold 1.5 => --threshold is a probability, at least 0 and less than 1, not 1.5
        run --threshold 0.5 => --threshold is for the probability of one of two classes; run predicts 10 classes
        run --sample 5 --pictures p => --sample writes a text and scores nothing; leave --predict, --json, --pictures
        run --samples --sample 3 => --sample N writes a text, and --samples scores those of train-sgld
    """),
    ("export_metrics", 1, "", """
        => give the folder of a run, or a folder with runs below it
        nowhere => nowhere does not exist
        bad.h5 => bad.h5 is a file, not the folder of a run
        run --out a.txt => --out a.txt: the name should end in .csv
        run --out bad.h5/a.csv => bad.h5/a.csv cannot be written
        run --out /proc/a.csv => /proc/a.csv cannot be written: No such file or directory
        run --to parquet => --to: expected one of 'csv', 'tensorboard', not parquet
        run --out run/ => ... run: the name should end in .csv
        begun => begun/metrics.jsonl cannot be read: No such file or directory
    """),
    ("gpu_check", 1, "", """
        --kernels scale,skale => unknown kernel 'skale' (did you mean 'scale'?); known:
        --sizes 4kb => --sizes: write 64KiB
        --elements 0 => --elements: whole numbers above 0 with commas between, not '0'
    """),
    ("gpu_check", 2, "", """
        => gpu-check runs on 1 rank, not on 2: start it without mpiexec
    """),
    ("hardware", 1, "", """
        --parts machine,memroy => unknown part 'memroy'
        --seconds 0 => --seconds must be greater than 0, not 0
        --seconds nan => --seconds: expected a number, not nan
        --batch-size 0 --roofline mlp => --batch-size must be greater than 0
        --size 12 => --size is 1KiB or more, not 12
        --size 4kb => --sizes: write 64KiB, 4MiB, 1GiB or a number of bytes, not '4kb'
        --roofline mlp --parts machine => --roofline and --run need the parts arithmetic and memory
        --run nowhere => nowhere is no folder of a run that has ended
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
    ("plan", 1, "", """
        memry => unknown plan 'memry' (did you mean 'memory'?); known: best, check, memory, scaling, simulate, time
        memory --model gpt9 => --model gpt9 is none of the named configurations (bert-large, gpt2-xl, turing-nlg,
        memory '-n 2: train-allreduce --model mpl:3' => unknown model 'mpl' (did you mean 'mlp'?); known: gpt,
        memory '-n 2: train-nothing' => unknown program 'train-nothing' (did you mean 'train-dqn'?); known:
        memory '-n 4: train-grid --grid data=3' => grid data=3,pipeline=1,context=1,expert=1,tensor=1 has 3 ranks, and
        memory '-n 3: train-tensor-parallel --model gpt --data text' => heads 4 cannot be divided evenly among 3
        memory '-n 4: train-tensor-parallel --model llama --data text' => kv-heads 2 cannot be divided evenly among 4
        memory '-n 9: train-pipeline --model mlp:8 --microbatches 1' => 9 stages are more than the model's 2 layers
        memory --model gpt3 --fit 1GiB => --fit needs --ranks, the number of ranks
        memory --model gpt2-xl --ranks 2 --fit much => --fit much: write a number of bytes, as 32GiB, 80GB or 500MiB
        memory train-allreduce --ranks 2 --fit 1GiB => --fit looks for a grid: give a line of train-grid, not of
        memory train-grid --model gpt3 => give lines, which name their models, or --model NAME, not both
        memory runs/none => runs/none is neither the folder of a run nor a line, as "-n 4: train-allreduce"
        time => give a line, as hpcdl plan time "-n 2: train-allreduce --model mlp:256"
        time train-allreduce => 'train-allreduce' has no number of ranks: write "-n 2: train-allreduce", or give
        time '-n 2: train-allreduce' --machine a --measure b => give --machine, which reads a file, or --measure,
        time '-n 2: train-allreduce' --machine nowhere.yaml => --machine nowhere.yaml cannot be read: No such file or
        time '-n 2: train-allreduce' --measure nowhere/a.yaml => --measure nowhere/a.yaml cannot be written: No such
        time '-n 100000: train-allreduce' => 100,000 ranks are too many to measure
        time '-n 2: train-allreduce' --launcher nowhere/mpiexec => --launcher nowhere/mpiexec cannot be started:
        time '-n 2: train-parameter-server --sparse-push' => --sparse-push is for sparse data, and these are dense:
        time '-n 2: train-nothing' => unknown program 'train-nothing' (did you mean 'train-dqn'?); known:
        best => --ranks must be greater than 0, not 0
        best --ranks 2 --model mpl:3 => unknown model 'mpl' (did you mean 'mlp'?); known: gpt, linear, llama, logistic,
        best --ranks 2 --fit much => --fit much: write a number of bytes, as 32GiB, 80GB or 500MiB
        check nowhere.yaml => nowhere.yaml cannot be read: No such file or directory
        check a.yaml b.yaml => give one file of lines, not several
        check --seconds 0 => --seconds is a number greater than 0, and at most 3600, not 0.0
        check --repeat 0 => --repeat must be greater than 0, not 0
        scaling nowhere nothing => nowhere is no folder of a run that has ended (summary.json is missing)
        scaling => the following arguments are required: runs
        memory '-n 1: train-dqn' => model 'mlp:64,64,dueling': the width of a hidden layer is a positive whole
        simulate star => unknown strategy 'star'; known: allreduce, gossip, local, pipeline, servers
        simulate --ranks ten => --ranks ten: numbers from 1 to 1,000,000, with commas between
        simulate allreduce --fastest => --fastest compares all-reduces only: leave out strategies, --fails-after and
        simulate --steps 0 => --steps must be greater than 0, not 0
        simulate pipeline:stages=3 --ranks 4 => pipeline:stages=3: 4 ranks are not a multiple of 3 stages
        simulate --picture a.pdf => --picture a.pdf: the name must end in .png or .svg
        simulate --cluster nowhere.yaml => --cluster nowhere.yaml cannot be read: No such file or directory
        simulate servers:consistency=async --ranks 1000000 --steps 1000 => 1,000,000 workers with 1,000 steps each
    """),
    ("postmortem", 1, "", """
        none => there is no folder none
        empty => empty has no flight recordings
        empty --last -1 => --last must not be negative, and is -1
    """),
    ("predict", 1, "", """
        nowhere digits => there is no checkpoint nowhere
        run same.h5 => ... has examples of shape (3,); the model was trained on shape (8, 8)
        run digits --out p.txt => --out p.txt: the name should end in .csv or .npz
        run words.txt --split test => ... is no data file (HDF5) with a part test: make one by prepare-data
    """),
    ("prepare_data", 1, "", """
        cvs a b => ... (did you mean 'csv'?)
        text a b --level bytes => ... (did you mean 'byte'?)
        csv a b --delimeter x => unrecognized arguments: --delimeter x (did you mean '--delimiter'?)
        => the following arguments are required: KIND
        jpg in out => ... invalid choice: 'jpg'
        idx in => the following arguments are required: OUT.h5
        npz in out.h5 --scale x => argument --scale: invalid number value: 'x'
        npz in out.h5 --scale 1/0 => argument --scale: invalid number value: '1/0'
        npz in out.h5 --scale 0 => the scale must be a number other than 0
        npz in nowhere/out.h5 => the folder nowhere does not exist
        npz in out.h5 --label 3 => unrecognized arguments: --label 3
        idx in out.h5 --test-fraction 0.1 => unrecognized arguments: --test-fraction 0.1
    """),
    ("report", 1, "", """
        => the following arguments are required: folders
        none => none: there is no such folder
        run empty => empty: there is no run in or below it: a run's folder holds config.yaml
        run run/summary.json => run/summary.json is a file; give the folder of a run
        run --out a/b.html => --out a/b.html cannot be written: there is no such folder
        run --out mine.html => --out mine.html exists, and no report has written it
        run --out a.pdf => --out a.pdf: the name should end in .html
        run --pictures run/summary.json => --pictures run/summary.json is a file; give a folder
        run --pictures /proc/none => --pictures /proc/none cannot be written
        run --picture-format pdf => --picture-format: expected one of
        run --picture a => unrecognized arguments: --picture a (did you mean '--pictures'?)
    """),
    ("search", 1, "", """
        --data few.h5 --space lr=log:0.001..0.5 --trials 3 --out s => begin with the program that trains
        train-alreduce --space lr=log:0.001..0.5 --trials 3 --out s => \
            unknown program 'train-alreduce' (did you mean 'train-allreduce'?)
        train-allreduce --steps 9 --method asha --space lr=log:0.001..0.5 --trials 3 --out s => \
            --method asha counts epochs
        train-kmeans --space lr=log:0.001..0.5 --trials 3 --out s => \
            train-kmeans cannot be run as one of several trainings: it trains
        '-n 2: train-allreduce' --space lr=log:0.001..0.5 --trials 3 --out s => \
            give the ranks of a trial by --ranks-per-trial, and begin
    """),
    ("search", 1, SEARCH, """
        --resume nowhere => ... there is no run in that folder
    """),
    ("search", 1, f"{SEARCH} --trials 3 --out s", """
        --trials 3 => there is nothing to search: give --space lr=log:0.001..0.5,
        --space lr=log:0..0.5 => --space lr: a logarithmic range begins above 0, not at 0
        --space lr=0.5..0.1 => --space lr: the range from 0.5 to 0.1 is empty
        --space lr=-1..0.5 => --space lr=-1.0: --lr must be greater than 0
        --space lr=0.1,0.2 => --space lr=0.1,0.2: --lr: expected a number, not 0.1,0.2; a list is written lr=0.1|0.2
        --space 'optimizer=adam|addam' => --space optimizer=addam: unknown optimizer 'addam' (did you mean 'adam'?)
        --space 'model=mlp:8|mpl:8' => --space model=mpl:8: unknown model 'mpl'
        --space 'optimizer=sgd|momentum' --space 'momentum:betta=0.5..0.9 if optimizer=momentum' => \
            --space optimizer=momentum: optimizer 'momentum' has no setting
    """),
    ("search", 1, f"{SEARCH} --trials 3 --out s --space lr=log:0.001..0.5", """
        --space lrr=0.1..1 => --space lrr: train-allreduce has no option --lrr (did you mean 'lr'?)
        --space seed=int:0..9 => ... the search itself sets --seed of each trial
        --objective test_acuracy => unknown objective 'test_acuracy' (did you mean 'test_accuracy'?)
        --objective test_rmse => unknown objective 'test_rmse'
        --method ransom => unknown method 'ransom' (did you mean 'random'?)
        --trials -1 => --trials must not be negative, and is -1
        --method asha --space epochs=int:2..5 => ... --method asha sets --epochs of each trial
        --method asha --least 9 => the shortest piece of a trial, 9 epochs, should be over 0 and
        --most 2.5 => --most 2.5: give a whole number of epochs
        --ranks-per-trial 3 => --ranks-per-trial 3: the job has 1
        --controller own => --ranks-per-trial 1: there are 0 ranks beside rank 0,
        --seeds 0 => --seeds must be greater than 0, not 0
        --only 3 => --only 3: the trials of this search are 0 to 2
        --only=-2 => --only is the number of a trial, 0 or more, not -2
        --only 1 --out auto => --only: the jobs of a search share its folder: give --out
        --only 1 --method asha => --only: trials of --method asha depend on each other
        --out none => --out none: a search reads the files of its trials;
        --out /proc/nothing => --out /proc/nothing cannot be written: No such file or directory
        --data nowhere.h5 => data file 'nowhere.h5' does not exist
        --topology ring => --space lr=0.001: unrecognized arguments: --topology ring (an
        --space-file nowhere.yaml => --space-file nowhere.yaml cannot be read
    """),
    ("supervise", 1, "", """
        --restarts 3 => no job is given: hpcdl supervise --restarts 3 -- mpiexec -n 4
        --restarts -1 -- hpcdl => --restarts must not be negative, and is -1
        --stalled -1 -- hpcdl => --stalled is 0 to
        --retries 3 -- hpcdl => unrecognized arguments: --retries
        --restarts -1 mpiexec -n 2 hpcdl train-svrg --out a => --restarts must not be negative, and is -1
        nompi -n 2 hpcdl train-svrg --out a => nompi cannot be started: No such file
        -- nompi -n 2 hpcdl train-svrg --out a => nompi cannot be started: No such file
    """),
    ("train_allreduce", 2, "", """
        --inject kill:rank=2 => --inject kill:rank=2: the ranks are 0 to 1, and there is no rank 2
    """),
    ("train_allreduce", 1, "--out a", """
        --class-weight balance => --class-weight balance: give balanced, or weights greater than 0, as NAME=5,OTHER=2
        --class-weight ten=5 => --class-weight ten=5: there is no class 'ten'
        --scores macro_f2 => unknown score 'macro_f2' (did you mean 'macro_f1'?)
        --scores f1 => --scores f1: this model and data have loss, accuracy, balanced_accuracy, macro_precision,
        --goal f1=0.8 => --goal f1=0.8: there is no score 'f1'
        --goal test_accuracy=high => --goal test_accuracy=high: give a number, as test_accuracy=0.95
        --goal validation_loss=1 => --goal validation_loss=1 needs rows for validation; add --validation FRACTION
        --data text --class-weight balanced => --class-weight is for classes of rows, and the data have the tokens
        --allreduce rings => \
            unknown all-reduce algorithm 'rings' (did you mean 'ring'?); known: auto, circulant, direct,
        --compress topk:0 => compression 'topk:0': fraction is above 0 and at most 1, not 0
        --compress topk:2 => compression 'topk:2': fraction is above 0 and at most 1, not 2
        --compress qsgd:levels=3 => compression 'qsgd' has no setting 'levels'; write NAME:KEY=VALUE with one of: bits,
        --compress signs => unknown compression 'signs' (did you mean 'sign'?); known: bfloat16, dgc,
        --compress dgc:0 => compression 'dgc:0': fraction is above 0 and at most 1, not 0
        --compress dgc --optimizer adam => --compress dgc is a part of the optimizer sgd or momentum, not of adam
        --compress dgc --noise-scale => --compress dgc sends no gradients: leave out --noise-scale
        --compress dgc --clip-norm 1 --overlap => --compress dgc: leave out one of --clip-norm and --overlap: a bucket
        --compress onebit-adam => --compress onebit-adam is a part of the optimizer adam or adamw, not of momentum
        --compress onebit-adam:0 => compression 'onebit-adam:0': warmup is a number of steps from 1 on, or a part
        --compress powersgd:0 => compression 'powersgd:0': rank is 1 or more, not 0
        --compress powersgd:99 => compression 'powersgd:99': rank is at most
        --compress sign --compress-from -1 => --compress-from must not be negative, and is -1
        --compress sign --compress-from 99999999 => --compress-from 99999999 leaves no tensor to compress
        --model mlq => unknown model 'mlq' (did you mean 'mlp'?); known: gpt, linear, llama, logistic, mlp, softmax
        --data digit => unknown data set 'digit' (did you mean 'digits'?); known: digits
        --lr -0.1 => --lr must be greater than 0, not -0.1
        --batch-size 0 => --batch-size must be greater than 0
        --overlap --bucket-mib 0 => --bucket-mib must be greater than 0
        --out /proc/run => --out /proc/run cannot be written
        --lr half => --lr: expected a number, not half
        --accumulate 999999999999999999 => \
            --accumulate 999999999999999999: a batch has 32 examples, and can have no more parts
        --accumulate 99999999999999999999 => --accumulate: expected a whole number of 64 bits, not 99999999999999999999
        --partition shards:999999999 => partition 'shards:999999999': there are 1438 training examples
        --model mlp:99999999999 => \
            --model mlp:99999999999, of 7,499,999,999,935 parameters, on each rank needs at least ... bytes of memory
        --model gpt:layers=99999999 => ... 'gpt:layers=99999999', by the number of its layers, needs at least 999,999,
        --pretend-compute 1e308 => --pretend-compute is 1,000,000,000 at most
        --straggler 0:inf => --straggler is RANK:FACTOR or random:PROBABILITY:FACTOR, not '0:inf'
        --allreduce ..:x => --allreduce ..:x should be an importable package.module:name
        --out {x*5000} => --out {x*594} ... {x*562} cannot be written: File name too long
        --data {x*5000} => ... cannot be read: File name too long
        --data bad.h5 => bad.h5 is not an HDF5 file; prepare-data makes one from idx,
        --lr 1 --nonsense => unrecognized arguments: --nonsense
    """),
    ("train_allreduce", 1, "--out run", """
        => --out run holds another run; give another folder, or --force to replace it, or --resume run
        --force --model nonsense => unknown model 'nonsense'
        --force --data absent.h5 => data file 'absent.h5' does not exist
    """),
    ("train_allreduce", 1, "--out none", """
        --respawn => --respawn replaces lost ranks: add --survive N, the number of ranks that may be lost
        --inject kil:rank=1 => --inject: unknown fault 'kil' (did you mean 'kill'?)
        --inject kill:rnk=1 => --inject: fault 'kill' has no setting 'rnk'
        --inject kill:rank=x => --inject: fault 'kill:rank=x': rank should be of type int, not 'x'
        --inject kill:rank=-1 => --inject kill:rank=-1: rank is 0 or more
        --inject kill:step=0 => --inject kill:step=0: step is 1 or more
        --inject exit:status=256 => --inject exit:status=256: a status is 0 to 255, not 256
        --inject exit:how=nicely => --inject exit:how=nicely: how is os or sys, not nicely
        --inject corrupt:what=all => --inject corrupt:what=all: what is parameters or data or checkpoint or message
        --inject slow:seconds=-1 => --inject slow:seconds=-1: seconds are 0 to 1,000,000,000, not -1
        --inject slow:seconds=nan => --inject slow:seconds=nan: seconds are 0 to
        --inject random:kinds=kill+bomb => --inject random:kinds=kill+bomb: unknown kind of fault 'bomb'
        --inject random:kinds=random => --inject random:kinds=random: unknown kind of fault 'random'
        --inject random:first=5,last=4 => --inject random:first=5,last=4: the last step, 4, is before the first
        --inject random:faults=1001 => --inject random:faults=1001: at most 1,000 faults are drawn
        --inject 'kill kill' => --inject: kill is given twice
        --survive 1 => \
            ... ends all ranks when one is lost; --survive needs Open MPI from 5.0 on, started with mpiexec --with-ft
        --model torch:torch_nets:lazy => ... gets its shape from the first batch
        --model torch:torch_nets:raising => ... ValueError: no such width (torch_nets.py, line
        --model torch:torch_nets:absent => --model torch:torch_nets:absent should be an importable
        --model torch:nowhere:make => --model torch:nowhere:make should be an importable
        --model torch:cnn => ... should be an importable package.module:name
        --model torch:cnn:make,width=4,hidden=16,kernel=3,depth=3 => \
            ... there is no setting 'depth'; it takes features, classes, width
        --model torch:cnn:make,width=4,hidden=16,kernel=3,buffers=none => ... unknown way with buffers 'none'
        --model mlp:8 --dtype bfloat16 => --dtype bfloat16 is only for PyTorch modules (--model
    """),
    ("train_apex", 1, f"{CHAIN} --model mlp:8 --replay 200 --chunk 4 --evaluate-every 100", """
        => no ranks are left for actors beside 1 learner, 1 replay rank: start 3 ranks or more, not 1
        --learners 0 => --learners must be greater than 0
        --replays -1 => --replays must not be negative, and is -1
        --chunk 0 => --chunk must be greater than 0
        --broadcast-every 0 => --broadcast-every must be greater than 0
        --epsilon-alpha nan => --epsilon-alpha: expected a number, not nan
        --resume nowhere => --resume nowhere: there is no run in that folder (config.yaml
    """),
    ("train_apex", 3, f"{CHAIN} --model mlp:8 --replay 200 --chunk 4 --evaluate-every 100", """
        --learners 2 => no ranks are left for actors beside 2 learners, 1 replay rank: start 4
        --env nothing:here => ... No module named 'nothing'
        --model softmax => --model softmax: action values need mlp:128,128, mlp
        --env-options size=3 => ... size
        --resume nowhere => --resume nowhere: there is no run in that folder
    """),
    ("train_apex", 4, f"{CHAIN} --model mlp:8 --replay 200 --chunk 4 --evaluate-every 100", """
        --learners 2 --replays 0 --batch-size 1 => --batch-size 1: 2 learners share it
        --learners 2 --replays 0 --replay 200 --learning-starts 195 => \
            ... the replay memories of 2 ranks never hold more
        --actors 1 => --actors 1, --learners 1 and --replays 1 are 3 ranks, but there are 4
        --replays 2 => 2 ranks with a replay memory need as many actors
    """),
    ("train_coordinate_descent", 1, "--data two.h5 --model logistic --out a --weight-decay 0.05", """
        --weight-decay 0 => --weight-decay must be greater than 0, and is 0.0
        --class-weight 1=2 => --class-weight has no effect on coordinate descent: leave it out
        --weight-decay 0 --l1 0.1 => --weight-decay must be greater than 0 (also with --l1: the dual
        --l1 -1 => --l1 must not be negative, and is -1.0
        --tolerance -1 => --tolerance must not be negative, and is -1.0
        --rounds 0 => --rounds must be greater than 0, not 0
        --threads 0 => --threads must be greater than 0, not 0
        --threads 5000 => --threads is 1,024 at most, not 5000
        --local-steps 0 => --local-steps must be greater than 0, not 0.0
        --local-steps 1e7 => --local-steps is 1,000,000 at most, not 10000000.0
        --aggregate mean => --aggregate: expected one of 'add', 'average', not mean
        --locking no => --locking: expected one of 'atomic', 'none', not no
        --device cuda => --device cuda: coordinate descent runs on CPUs; leave out
        --placement streamed => a rank needs its rows in memory: take --placement shared or partitioned, without
        --data-servers 1 => a rank needs its rows in memory: take --placement shared or partitioned, without
        --lr 1 => --lr has no effect on coordinate descent: leave it out
        --optimizer adam => --optimizer has no effect on coordinate descent: leave it out
        --schedule 1/t => --schedule has no effect on coordinate descent: leave it out
        --epochs 3 => --epochs has no effect on coordinate descent: leave it out
        --steps 3 => --steps has no effect on coordinate descent: leave it out
        --batch-size 8 => --batch-size has no effect on coordinate descent: leave it out
        --batch-per-rank 8 => --batch-per-rank has no effect on coordinate descent: leave it out
        --clip-norm 1 => --clip-norm has no effect on coordinate descent: leave it out
        --accumulate 2 => --accumulate has no effect on coordinate descent: leave it out
        --average from=1 => --average has no effect on coordinate descent: leave it out
        --augment flip => --augment has no effect on coordinate descent: leave it out
        --straggler 0:2 => --straggler has no effect on coordinate descent: leave it out
        --pretend-compute 1 => --pretend-compute has no effect on coordinate descent: leave it out
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
        --envs 8 --evaluate-every 100 => --evaluate-every 100: give a multiple of 8 environment
        --replay 1000000000000000 => --replay 1000000000000000 should be from 5 to 2147483647: each
        --model softmax => --model softmax: action values need mlp:128,128, mlp:128,128,dueling or
        --epsilon 2 => --epsilon 2: first and last are probabilities, from 0 to 1; steps
        --loss hinge => unknown loss 'hinge'; known: huber, squared
        --gamma 1.5 => --gamma is at least 0
        --env-steps 0 => --env-steps must be greater
        --n-step 0 => --n-step must be greater
        --batch-size full => --batch-size full: give a number of transitions
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
        --folds 1 => --folds 1: give 2 folds or more, and no --members: there is one for each fold
        --folds 3 --members 4 => --folds 3: give 2 folds or more, and no --members
        --folds 3 --bagging => --folds says which rows a member has: leave out --bagging
        --folds 3 --boost samme => --boost and --folds cannot be combined: give one of them
        --members -1 => --members must not be negative
        --ranks-per-member 0 => --ranks-per-member must be greater than 0
        --subspace 0 => --subspace is a fraction, more than 0
        --snapshots 2 --boost samme => --snapshots and --boost cannot be combined: give one of them
        --snapshots 2 --bagging => --snapshots decides about rows and ranks itself: leave out --bagging
        --boost samme --combine mean --ranks-per-member 2 => --boost decides about rows and ranks itself
        --data penguins.h5 --combine vote => --combine vote is for classes, and penguins.h5 has values to
        --data penguins.h5 --boost samme => --boost samme is for classes, and penguins.h5 has values to predict:
        --best 2 => --from SEARCH and --best N belong together
        --vary lr => ... give an option once, with its values
        --vary 'seed=1|2' => --vary seed: this option is the same for all members
        --vary 'modle=mlp|softmax' => ... unrecognized arguments: --modle=mlp
        --combine stacking => --combine stacking is fitted on rows held out of training: add
        --bagging --placement streamed => --bagging, --folds and --boost choose rows, which needs --placement shared
        --resume nowhere => --resume nowhere: an ensemble keeps its members and options; leave out 'out'
        --vary => --vary needs a value
    """),
    ("train_ensemble", 2, "--data few.h5 --model softmax --epochs 2 --batch-size 4 --out e", """
        --ranks-per-member 3 => --ranks-per-member 3: there are 2 ranks
        --data-servers 1 --ranks-per-member 2 => --data-servers: an ensemble draws rows and features on the ranks
    """),
    ("train_federated", 1, "--out a", """
        --clients 0 => --clients 0 is for --partition column:NAME, which names the
        --clip 1 --noise 1 --class-weight balanced => --class-weight balanced counts the classes of all clients, which
        --clients -1 => --clients must not be negative
        --secure --compress bfloat16 => --compress: masks of --secure cancel in sums of fixed-point numbers only
        --clip 1 --compress bfloat16 => --compress: a compressed change may be longer than --clip allows
        --late 0.1 --compress bfloat16 => --compress: late answers are not compressed; leave out one of them
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
        --epochs 3 => --epochs: federated averaging has --rounds, --local-epochs and
        --batch-size 64 => --batch-size: federated averaging has --rounds, --local-epochs and
        --steps 9 => --steps: federated averaging has --rounds, --local-epochs and
        --placement partitioned => federated averaging needs --placement shared, without
        --data-servers 1 => federated averaging needs --placement shared, without
        --augment shift:1 => federated averaging needs --placement shared, without
        --clients 2000 => 1438 training examples cannot be divided among 2000 clients
        --server-optimizer rms => unknown optimizer 'rms'; known: adagrad, adam, adamw,
        --server-optimizer fedadm => unknown optimizer 'fedadm' (did you mean 'fedadam'?)
        --server-optimizer fedadagrad:beta2=0.9 => optimizer 'fedadagrad' has no setting 'beta2'
        --server-optimizer fedyogi:beta1=1 => the server's beta1 is at least 0 and less than 1, not 1.0
        --server-optimizer fedadam:beta2=nan => ... beta2
        --server-optimizer fedadam:tau=0 => the server's tau is positive, not 0.0
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
        --clients 12 --rounds 3 --secure --fraction 0.1 => --secure needs 2 clients in a round, or more; take a larger
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
            --model mlp:99999999999, of 7,499,999,999,935 parameters, on each rank needs at least ... bytes of memory
    """),
    ("train_gorila", 1, f"{CHAIN} --model mlp:8,dueling --replay 400 --evaluate-every 120 --chunk 2 --sync-every 4", """
        --consistency bsp --actors 1 => --consistency bsp is for ranks that act and learn
        --servers 0 => --servers must be greater than 0
        --sync-every 0 => --sync-every must be greater than 0
        --chunk 0 => --chunk must be greater than 0
        --actors -1 => --actors must not be negative, and is -1
        --optimizer muon => --optimizer muon updates whole matrices, and a parameter server holds a slice of the vector
        --outliers -1 => --outliers must not be negative, and is -1.0
        --max-staleness -1 => --max-staleness must not be negative, and is -1
        --consistency ssp => --consistency: expected one of 'bsp', 'async', not ssp (did you
        --partition shards:2 => --partition: this program learns in an environment
        => no ranks are left for bundles beside 1 parameter server: start 2 ranks or more, not 1
        --actors 2 => ... 1 parameter server, 1 learner: start 4 ranks or more, not 1
    """),
    ("train_gorila", 4, f"{CHAIN} --model mlp:8,dueling --replay 400 --evaluate-every 120 --chunk 2 --sync-every 4", """
        --servers 2 --learners 2 => no ranks are left for actors beside 2 parameter servers, 2 learners
        --actors 1 --learners 1 => --actors 1, --learners 1 and 1 parameter server are 3
        --learners 2 => --learners 2: each needs an actor, and there are 1
        --batch-size 390 => --batch-size 390: the replay memories of 3 ranks never hold more than
        --envs 40 => --batch-size 8: the replay memories of 3 ranks never hold more
        --learning-starts 390 => --learning-starts 390: the replay memories of 3 ranks never hold
        --consistency bsp --evaluate-every 2 => --evaluate-every must be at least 3 environment steps, those
        --replay 1099511627776 => --replay 366503875926 should be from 5 to 2147483647: each of 1
        --env refusedchains:nothing => --env refusedchains:nothing should be an importable
    """),
    ("train_gossip", 1, "--out a", """
        --draw graph.nothing => cannot draw into graph.nothing: end its name with .png, .svg or
    """),
    ("train_gossip", 3, "--out a", """
        --topology hypercube => a hypercube has a power of two of ranks, not 3
        --topology pieces.edges => ... no path leads from rank 0 to rank 2
        --method defacto --topology one-peer => no exact averaging in factors on 3 ranks: one-peer needs a power
    """),
    ("train_gossip", 4, "--out a", """
        --topology far.edges => far.edges, line 1: there is no rank 7; the ranks are 0 to 3
        --topology heavy.edges => mixing matrix: row 1 gives rank 1 the weight -0.4
        --topology rings => unknown topology 'rings' (did you mean 'ring'?); known:
        --topology absent/file => cannot read the edges in absent/file: No such file or directory
        --method detag --topology one-peer => detag needs a graph that stays the same, but one-peer
        --method adpsgd --topology one-peer => adpsgd averages pairs of ranks, but one-peer has directed edges; take
        --method adpsgd --phase 3 => ... leave out --mixing and --phase
        --method dpsgd --phase 3 => dpsgd has no phases: leave out --phase, the number of batches
        --phase -1 => --phase must not be negative, and is -1
        --mixing any => --mixing: expected one of 'metropolis-hastings', 'uniform', not
        --compress float61 => unknown compression 'float61' (did you mean 'float16'?);
        --compress bfloat16 --method dpsgd => --compress is CHOCO-SGD, which takes a step and then averages: leave out
        --compress bfloat16 --topology one-peer => --compress needs a graph that stays the same, but one-peer
        --compress bfloat16 --consensus-step 2 => --consensus-step is at most 1, not 2.0
        --consensus-step 0.5 => --consensus-step is for --compress: leave it out
    """),
    ("train_grid", 1, "--data digits", """
        --schedule interleaved --model mlp:5,5 --grid pipeline=1 => the schedule interleaved needs at least 2 stages
    """),
    ("train_grid", 2, "--data digits", """
        --schedule interleaved --chunks 2 --model mlp:5,5 --grid pipeline=2 => \
            4 stages are more than the model's 3 layers
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
            4 stages are more than the model's 3 layers (dense1, dense2, dense3); take
    """),
    ("train_grid", 1, "--out a", """
        --schedule constant => --schedule is the pipeline's, not the learning rate's: write --lr-schedule constant
        --schedule pipedream => --schedule pipedream updates each stage by itself: take train-pipeline,
        --stage 4 => --stage is 0, 1, 2 or 3, not 4
        --stage -1 => --stage is 0, 1, 2 or 3, not -1
    """),
    ("train_grid", 2, "--out a", """
        --grid data=2,tensor=2 => grid data=2,pipeline=1,context=1,expert=1,tensor=2 has 4 ranks, and the job has 2
    """),
    ("train_grid", 2, "--data digits", """
        --grid expert=2 --model mlp:8 => expert parallelism shares the experts of mixtures: take --model gpt:experts=4
    """),
    ("train_grid", 2, "--data text.h5 --grid expert=2", """
        --model gpt => expert parallelism shares the experts of mixtures: take --model gpt:experts=4
        --model gpt:experts=1,top=1 => 2 ranks cannot share 1 expert evenly; take 2 experts
        --model gpt:experts=9 => 2 ranks cannot share 9 experts evenly; take expert=3 or 9, or 8 or 10 experts
    """),
    ("train_grid", 4, "--data text.h5 --grid context=2,expert=2", """
        --model gpt:experts=4 => ranks that share the tokens of sequences cannot count the choices of experts
    """),
    ("train_hogwild", 1, "--out a", """
        --threads 0 => --threads must be greater than 0, not 0
        --threads 5000 => --threads is 1024 at most, not 5000
        --join-every 0 => --join-every must be greater than 0, not 0
        --round-size=-1 => --round-size must not be negative, and is -1
        --exchange-every=-1 => --exchange-every must not be negative
        --exchange-every 9 --locking striped => --exchange-every 9: --locking striped is for threads that
        --optimizer momentum => --optimizer momentum moves coordinates that are 0 in an example;
        --device cuda => --device cuda: HOGWILD! runs on CPU cores; leave out --device
        --placement streamed => --placement streamed: threads need the rows in memory; take
        --data-servers 1 => --data-servers has no effect on threads that take single examples
        --clip-norm 1.0 => --clip-norm has no effect on threads that take single examples
        --augment flip => --augment has no effect on threads that take single examples
        --average 1 => --average 1: give the epoch from which on the parameters are
        --average from=-1 => --average from=-1: give the epoch from which on the parameters are
        --average from=nan => --average from=nan: give the epoch from which on the parameters are
        --average to=5 => --average to=5: give the epoch from which on the parameters are
        --batch-size full => --batch-size: expected a whole number, not full
        --servers 1 => --servers needs --join servers
        --join servers --shared => --join servers: each worker has a vector of its own; leave out
        --join servers --join-every 2 => --join servers pushes after each round: take --round-size, not
        --join servers --optimizer adagrad => --join servers adds up the workers' changes, which share no
        --join servers --partition by-label => --partition by-label: with --join servers any worker may do any
        --model mlp:8 => ... take --model linear, logistic, svm or softmax
        --join rings => --join: expected one of 'all-reduce', 'gossip', 'servers', not
        --join servers => no worker is left over: 1 parameter server of 1 rank; start at
        --exchange-every 64 --locking round-robin => --exchange-every 64: --locking round-robin is for threads
    """),
    ("train_kmeans", 1, "", """
        --servers 2 --clusters 1 => --servers 2 cannot share 1 cluster
        --consistency async => --consistency async needs --batch-size: Lloyd's algorithm goes in rounds
        --consistency ssp --staleness 1 => --consistency ssp needs --batch-size: Lloyd's algorithm goes in rounds
        --staleness 2 --batch-size 5 => a staleness of 2 is for ssp only; with bsp take 0
        --rounds 0 => --rounds must be greater than 0
        --batch-size=-1 => --batch-size must not be negative
        --out a.txt => --out a.txt: the name should end in .npz
    """),
    ("train_kmeans", 2, "", """
        --data same.h5 --clusters 3 => --clusters 3: the training part has only 2 different rows
    """),
    ("train_kmeans", 4, "", """
        --clusters 1439 => --clusters 1439: digits has only 1438 training rows
        --servers 4 => no worker is left over: 4 parameter servers of 4 ranks; start at least 5
    """),
    ("train_local_sgd", 1, "--out a", """
        --sync-every 0 => --sync-every must be greater than 0, not 0
        --compress powersgd:99 => compression 'powersgd:99': rank is at most
        --sync-every 1.5 => --sync-every: expected a whole number, not 1.5
        --local-from -1 => --local-from must not be negative, and is -1
        --outer muon --outer-lr 0.7 => muon updates the weights of hidden layers, and there are none here; take adamw
        --outer newton => unknown outer rule 'newton'; known: adagrad, adam, adamw, average, momentum,
        --outer momentum:beta=1 => the momentum's beta is at least 0 and less than 1, not 1.0
        --outer sgd --outer-lr 0 => --outer-lr must be greater than 0, not 0.0
        --outer sgd --outer-lr -1 => --outer-lr must be greater than 0, not -1.0
        --outer-lr 0.7 => --outer average has no learning rate: leave out --outer-lr, or add --outer sgd
        --compress float61 => unknown compression 'float61' (did you mean 'float16'?);
        --local-momentum drop => --local-momentum: expected one of 'keep', 'average', 'reset', not drop
        --local-momentum reset --optimizer sgd => --local-momentum reset: --optimizer sgd has no momentum;
    """),
    ("train_model_parallel", 1, "--out a", """
        --balance time => --balance: expected one of 'parameters', 'measured', not time
        --schedule 1f1b --microbatches 4 => unrecognized arguments: --microbatches 4
    """),
    ("train_parameter_server", 1, "--out a", """
        --servers 0 => a parameter store needs at least one server, not 0
        --servers 3 --servers-on-workers => --servers-on-workers makes every rank a server: leave out --servers
        --servers -1 => --servers must not be negative, and is -1
        --sparse-push --compress bfloat16 => --sparse-push sends other rows in each push: leave out --compress
        --broadcast-every 1 --compress-pull float16 => --compress-pull: servers that broadcast send values as they are
        --compress-pull topk => --compress-pull takes float16, bfloat16, int8, qsgd, which keep each value, not topk
        --servers 2 --replicas 2 --compress float16 => --replicas: what --compress leaves out has no replicas; leave it
        --servers 9 => no worker is left over: 9 parameter servers of 1 rank; start at
        --consistency ssp --staleness -1 => the staleness must be 0 clocks or more, not -1
        --staleness 2 => a staleness of 2 is for ssp only; with bsp take 0
        --consistency async --staleness 2 => a staleness of 2 is for ssp only; with async take 0
        --consistency asink => --consistency: expected one of 'bsp', 'ssp', 'async', not asink
        --broadcast-every -1 => --broadcast-every must not be negative
        --fixed-delay -1 => --fixed-delay must not be negative
        --fixed-delay 2 --checkpoint-every 5 => --fixed-delay: a checkpoint holds no delayed updates; leave out
        --consistency async --placement partitioned => --consistency async draws batches from all rows: leave out
        --consistency async --partition by-label => --consistency async draws batches from all rows: leave out
        --servers-on-workers --device cuda => --servers-on-workers keeps slices in host memory; with a GPU, take
        --sparse-push --device cuda => --sparse-push needs gradients in host memory: leave out
        --sparse-push --broadcast-every 1 => ... leave it out with --sparse-push
    """),
    ("train_parameter_server", 3, "--out a", """
        --optimizer muon --model mlp:8 => --optimizer muon updates whole matrices, and a parameter server holds a slice
        --broadcast-every 2 => a broadcast every 2 clocks needs a staleness of 1 or more; or
        --consistency ssp --staleness 1 --broadcast-every 3 => \
            a broadcast every 3 clocks needs a staleness of 2 or more; or
        --fixed-delay 2 --consistency ssp --staleness 3 => a fixed delay is 0 versions or more, for bsp and async; ssp
    """),
    ("train_parameter_server", 4, "--out a", """
        --servers 4 => no worker is left over: 4 parameter servers of 4 ranks; start at least 5 ranks
        --servers 3 --data narrow.h5 --model logistic => 3 servers cannot share 2 parameters
        --servers 2 --straggler 1:3 => ... rank 1 is no worker; ranks 2 to 3 are workers
    """),
    ("train_parameter_server", 1, "--out none", """
        --servers 2 --replicas 3 => 3 replicas of each slice need 3 servers, not 2
        --servers 2 --replicas 0 => --replicas counts the servers of each slice: 1 or more, not
        --servers 2 --survive 1 => --survive: a lost server would take its slice with it; give
        --servers 2 --replicas 2 --fixed-delay 1 => --replicas 2 does not work with --fixed-delay: leave out one of
    """),
    ("train_parameter_server", 3, "--out none", """
        --servers 2 --replicas 2 --clip-norm 1 => --replicas: a replica does not know the norm of a round's sum, which
        --servers 2 --replicas 2 --average from=1 => --replicas: the mean of the iterates has no replicas; leave out
        --servers 2 --replicas 2 --survive 1 => ... --survive needs Open MPI from 5.0 on, started with
    """),
    ("train_pipeline", 1, "", """
        --survive 1 => ... an option of train-allreduce and train-federated and train-gossip and train-local-sgd
    """),
    ("train_pipeline", 1, "--data digits", """
        --schedule interleaved --model mlp:5,5 => the schedule interleaved needs at least 2 stages
    """),
    ("train_pipeline", 2, "--data digits", """
        --schedule interleaved --chunks 2 --model mlp:5,5 => 4 stages are more than the model's 3 layers
        --schedule interleaved --microbatches 3 --model mlp:5,5 => 2 interleaved stages need a multiple of 2
        --schedule interleaved --microbatches 1 --model mlp:5,5 => 2 interleaved stages need a multiple of 2
        --microbatches 0 --model mlp:5,5 => a pipeline needs at least 1 micro-batch, not 0
        --chunks 2 --model mlp:5,5,5 => the schedule 1f1b has 1 chunk per stage, not 2; take interleaved
        --accumulate 2 --model mlp:5,5 => --accumulate: a pipeline cuts its batches by --microbatches
        --schedule auto --fit 1KiB --model mlp:5,5 => --fit 1KiB: no schedule needs less than
        --schedule auto --fit much --model mlp:5,5 => --fit much: write a number of bytes
        --schedule zb-v --model mlp:5,5 => 4 stages are more than the model's 3 layers
        --schedule dualpipe-v --microbatches 3 --model mlp:5,5,5 => \
            the schedule dualpipe-v on 2 stages needs at least 4 micro-batches, not 3; take zb-v
        --schedule zb-h1 --chunks 2 --model mlp:5,5,5 => the schedule zb-h1 has 1 chunk per stage, not 2
        --schedule pipedream --clip-norm 1 --model mlp:5,5 => --schedule pipedream: stages wait for no common norm
        --schedule pipedeam --model mlp:5,5 => unknown pipeline schedule 'pipedeam' (did you mean 'pipedream'?)
    """),
    ("train_pipeline", 4, "--data digits", """
        --model mlp:5,5 => 4 stages are more than the model's 3 layers (dense1, dense2, dense3); take
    """),
    ("train_pipeline", 2, "--data text.h5", """
        --schedule pipedream --model gpt:layers=2,width=8,heads=2,head=tied => \
            --schedule pipedream: the first and the last stage
    """),
    ("train_pipeline", 1, "--out a", """
        --fit 1GiB => --fit is for --schedule auto: leave it out
        --schedule cosine => --schedule is the pipeline's, not the learning rate's: write --lr-schedule cosine
        --schedule step:every=3 => --schedule is the pipeline's, not the learning rate's: write --lr-schedule
        --balance evenly => --balance: expected one of 'parameters', 'measured', not evenly
    """),
    ("train_pipeline", 2, "--out a", """
        --microbatches 9999999 => --microbatches 9999999: a batch has 32 examples
    """),
    ("train_pipeline", 3, "--out a", """
        --model mlp:8 => 3 stages are more than the model's 2 layers (dense1, dense2);
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
        --batch-size some => --batch-size is a number of examples, or full, not 'some'
        --batch-per-rank -2 => --batch-per-rank must not be negative
        --epochs 0 => --epochs must be greater than 0
        --epochs 1.5 => --epochs: expected a whole number, not 1.5
        --dtype float16 => --dtype: expected one of 'float32', 'float64', 'bfloat16', not float16 (did you
        --placement sharde => ... not sharde (did you mean 'shared'?)
        --learning-rate 1 => unrecognized arguments: --learning-rate 1 (did you mean '--lr'?)
        --overlap => unrecognized arguments: --overlap (an option of train-allreduce)
        --placement cloud => --placement: expected one of 'shared', 'partitioned', 'streamed', not cloud
        --validation 1 => --validation is a fraction, at least 0 and less than 1, not 1.0
        --patience 3 => --patience needs a validation loss; add --validation
        --nonsense 3 => unrecognized arguments: --nonsense 3
        --config no.yaml => --config no.yaml cannot be read: No such file or directory
        --resume nowhere => --resume nowhere: there is no run in that folder
        --device tpu => --device: expected one of 'cpu', 'cuda', not tpu
    """),
    ("train_sequential", 2, "", """
        => this strategy runs on 1 rank, not on 2
    """),
    ("train_sgld", 1, "--out a", """
        --optimizer momentum => --optimizer momentum: Langevin dynamics takes plain gradient steps; take sgd
        --weight-decay 0.1 => --weight-decay D: give a prior instead, --prior-precision
        --clip-norm 1 => --clip-norm: clipped gradients lead to another posterior; take a
        --augment flip => --augment: the posterior is that of unchanged examples; leave
        --prior-precision -1 => --prior-precision must not be negative, and is -1.0
        --noise-variance 0 => --noise-variance must be greater than 0, not 0.0
        --burn-in -1 => --burn-in must not be negative, and is -1
        --thin -1 => --thin must not be negative, and is -1
        --chains 0 => --chains must be 1 or more, not 0
        --chains 2 --partition by-label => --chains read all rows: --placement shared or streamed,
        --chains 2 --placement partitioned => --chains read all rows: --placement shared or streamed,
        --schedule polynomial:b=0 => the schedule's b is positive, not 0.0
        --noise-variance 2 => --noise-variance is for regression, not for classes: leave it
        --thin 1 --epochs 30 => 1125 samples of a chain are too many, 1000 are kept at most: take --thin 2 or
        --data two.h5 --model svm => the hinge loss is no log-likelihood: take --model logistic
    """),
    ("train_sgld", 2, "--out a", """
        --chains 3 => --chains 3: each chain needs a rank, and there are only 2
    """),
    ("train_svrg", 1, "", """
        --survive 1 => ... an option of train-allreduce and train-federated and train-gossip and train-local-sgd
    """),
    ("train_svrg", 1, "--out a", """
        --optimizer adam => --optimizer adam: variance reduction takes plain gradient steps; take sgd
        --inner-epochs 0 => --inner-epochs must be greater than 0, not 0.0
        --clip-norm 1 => --clip-norm: clipped steps undo the variance reduction; take a
        --augment flip => --augment: an example that changes has no gradient to keep; leave it out
        --method sag => --method: expected one of 'svrg', 'saga', not sag
        --method saga --inner-epochs 1 => --method saga takes no snapshots: leave out --inner-epochs
        --method saga --threads 2 => --method saga takes no snapshots: leave out --inner-epochs
        --method saga --device cuda => --method saga works on single examples, on the CPU
        --method saga --accumulate 2 => --method saga does not cut batches into parts: leave out
        --threads 2 --straggler 0:2 => --threads calls no model that could be slowed
        --threads -1 => --threads must not be negative, and is -1
        --threads 2000 => --threads is 1024 at most, not 2000
        --threads 2 --snapshot random => --threads: without locks there is no single iterate to draw;
        --threads 2 --inner-epochs 1.5 => --threads meet at ends of epochs: --inner-epochs is whole, not 1.5
        --threads 2 --batch-size 16 => --threads take steps of one example: leave out --batch-size
        --threads 2 --device cuda => --threads works on single examples, on the CPU
        --threads 2 --placement streamed => --threads need the rows in memory: take --placement shared,
        --threads 1 => --threads works on the coordinates of linear models: take --model
    """),
    ("train_svrg", 2, "--out a", """
        --threads 2 --model softmax => --threads share the parameters of one rank, and there are
        --method saga => --method saga works on the coordinates of linear models: take --model
    """),
    ("train_context_parallel", 3, "--data text.h5", """
        --model gpt:heads=4,width=12 => 3 ranks cannot cut sequences of 10 tokens into two chunks each; take
        --placement partitioned --model gpt => --placement partitioned: ranks that share a model
    """),
    ("train_context_parallel", 5, "--data text.h5", """
        --model gpt:heads=4,width=8 --attention ulysses => --attention ulysses: 5 ranks cannot share 4 heads of keys
        --model gpt --attention flash => --attention: expected one of 'ring', 'ulysses', 'auto', not flash
        --model gpt --stage 4 => --stage is 0, 1, 2 or 3, not 4
    """),
    ("train_context_parallel", 2, "--data digits", """
        --model mlp:8 => context parallelism shares the tokens of sequences: take --model gpt
    """),
    ("train_tensor_parallel", 2, "--data digits", """
        --model mlp:7 => a hidden layer's width 7 cannot be divided evenly among 2 ranks; choose
        --model mlp:8 --sequence-parallel => sequence parallelism shares the tokens of sequences: take --model gpt
    """),
    ("train_tensor_parallel", 3, "--data text.h5", """
        --model gpt:heads=4,width=12 => heads 4 cannot be divided evenly among 3 ranks; choose
    """),
    ("train_tensor_parallel", 4, "--data text.h5", """
        --model gpt:heads=4,width=8 --sequence-parallel => 4 ranks cannot share sequences of 10 tokens evenly
    """),
    ("train_tensor_parallel", 2, "--data two.h5", """
        --model logistic => ranks cannot share the outputs of the loss Logistic; add
    """),
    ("train_tensor_parallel", 1, "--out a", """
        --sequence-parallel 3 => unrecognized arguments: 3
    """),
    ("train_tensor_parallel", 2, "--out a", """
        --placement partitioned => --placement partitioned: ranks that share a model
    """),
    ("watch", 1, "", """
        => give the folder of a run, or a folder with runs below it
        nowhere => nowhere does not exist
        run/config.yaml => run/config.yaml is a file, not the folder of a run
        empty => empty is no run's folder (metrics.jsonl is missing), and no folder below it is one
        run --every 0 => --every is a number of seconds from 0.1 to 86,400, not 0
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
