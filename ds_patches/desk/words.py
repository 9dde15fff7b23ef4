"""Words that people use for what the tables say: data of `explain`.

A word of the tables stands before those that mean the same. All are regular expressions of whole
words, and the first that fits counts: "gradient checkpointing" is no checkpoint.
"""

from __future__ import annotations

_NOT = (
    r"((do|does|did|is|are|was|were|has|have|will|would|ca|could|wo)n.?t|not|never|hardly|barely)"
)
#: The words of the tables, each with what else is said for it.
SAME = {
    "recomputation": r"(activation|gradient)[ _-]checkpoint\w*",
    "accumulation": r"grad\w*[ _-]acc\w*|accumulat\w*|micro[ -]?(batch|step)\w*",
    "grad_norm": r"gnorm|(grad\w*|global)[ _-]?norms?",
    "retain_graph": r"retain\w* (the )?graph",
    "two loss": r"(two|2|several|multiple|both) (loss|backward)\w*|(loss|backward)\w* twice|"
    r"second (loss|backward)\w*",
    "gan": r"gans?|adversarial|discriminators?|critics?|generators?|"
    r"(two|2|both|several|multiple) (deepspeed )?(models?|engines?|networks?|optimizers?)",
    "expert": r"experts?|moes?|mixtral\w*|deepseek[ -]?\w*|\w+[ -]?moe|mixture of experts",
    "hang outset": r"nothing (happens?|is printed)|prints? nothing|no output",
    "hang": r"hang\w*|hung|stuck|freez(e|es|ing)|froze|(is|gets?|got|training) frozen|"
    r"dead[ -]?lock\w*|stall\w*|blocks? for ?ever|idles?|"
    r"nccl time\w*|times? out|timed out|(keeps? |is )?waiting|waits?|no progress|"
    rf"{_NOT} (return|finish|end|start|proceed|continue|respond|progress)\w*|"
    rf"{_NOT} (doing|do) anything|stops? respond\w*",
    "not train": rf"{_NOT} (train|learn|updat|chang|mov|improv|fall|decreas|go down|drop)\w*|"
    r"(stay|remain|is|are)s? (flat|constant|the same)",
    "lost": r"lost|disappear\w*|vanish\w*|missing|overwrit\w*|ignored?|discarded|no effect|"
    rf"{_NOT} (used|counted|applied|seen)",
    "worse": r"wors\w*|too (small|large|big|high|low|weak|strong)|"
    r"higher|lower|larger|smaller|differ\w*|wrong\w*|diverg\w*|spik\w*|jump\w*|"
    rf"{_NOT} (match|converg|agree|reproduc)\w*|discrepan\w*|"
    r"(?<!type )(?<!size )(?<!shape )(?<!device )mis-?match\w*|inconsisten\w*|"
    r"incorrect\w*|degrad\w*|explod\w*|unstable|bad|off|drop(s|ped)?|(?<!i )(?<!we )chang(es?|ed)|"
    rf"poor\w*|much (more|less)|{_NOT} the same|regress\w*|decreas(es|ed)|increas(es|ed)|goes up|"
    r"collapse[sd]?|inaccura\w*|shift(s|ed)",
    "elsewhere": r"(upgrad|updat|migrat|mov)\w* (\w+ ){0,3}?"
    r"(transformers|accelerate|trl|peft|py?torch|torch|cuda|python|drivers?)",
    "upgrade": r"(up|down)grad\w*|updat(ed?|ing)( to)?|(new|late|old)\w* (version|release)s?|"
    r"across \w* ?versions?|between versions|versions?|since (v?0\.\d+[.\d]*)|migrat\w*",
    "resume": r"resum\w*|restor\w*|restart\w*|(load\w*|from|after) (a |the |an? old )?checkpoint\w*"
    r"|continu\w* (train\w*|from)|checkpoint (was |is )?load\w*|reload\w*",
    "slow": r"slow\w*|(takes?|took) (\w+ ){0,3}long\w*|throughput|half (as|the) (fast|speed)|"
    r"speed (drop|regress)\w*|\d+x longer",
    "memory grow": r"memory (\w+ )?(grow|increas|ris|leak|climb|go)\w*|leak\w*( memory)?|"
    r"(grow|increas|ris)\w* memory",
    "nan": r"nans?|infs?|infinite",
    "fail": rf"fail\w*|crash\w*|errors?|rais\w*|exceptions?|{_NOT} work\w*|broken|assert\w*",
    "rank": r"processes|workers?|gpus?|ranks?|nodes?",
    "offload": r"(cpu )?offload\w*",
    "long sequence": r"long\w* (sequence|context|input|prompt)s?",
    "evaluation": r"eval\w*|validation",
    "outset": r"(before|at|from|in) (\w+ )?(start|begin|first (run|import))\w*|start ?up|"
    r"before (the )?(first step|(any )?train\w*)|at (the )?(very )?begin\w*|beginning|"
    r"(at|in|during|on|after) (deepspeed )?init\w*",
    "torch_extensions": r"torch[_ ]extensions?|(build|compil|load)\w* (\w+ )?(ops?|operators?|"
    r"extensions?|kernels?|cpu_adam|fused_adam)|(jit|ninja)( build| compil\w*)?",
}

#: What says nothing by itself.
_COMMON = """
13b 70b 7b 8b 8xh100 a a100 able about above accelerate across actually add added after again
against all almost along already also although always am an and any anybody anyone anything appear
appears are around as at away axolotl base batch be because been behave behaves behavior behaviour
believe below bert between big bit both bug but by call called calling can cannot case cases cause
caused causes causing chat code come compare compared comparing correct correctly could custom data
dataset day ddp deepspeed did do does doesn't doing don don't down dpo ds during each earlier early
engine enough epoch epochs even ever every everything expected few find fine finetune finetuning
first fix fixed for found from fsdp full gemma get gets getting give gives go goes got gpt gpu gpus
grpo guess h100 h200 had happen happened happens has have hello help here hf hi hours how however
huggingface i if im impossible in instruct into is isn't issue it iteration iterations its just
keep keeps kept kind know late later left less let lets lightning like llama look loss lot machine
machines made make makes many maybe me mean mine minutes mistral model more most much my nearly
need new next no node nodes normal normally not notice noticed now observe observed occur occurred
occurs odd of off old on one only or other our out over own past peft per perhaps phi please
possible ppo pretty previous probably problem put pytorch question quite qwen rather read reads
really reason report reported reports result resulting results right rlhf run running runs same
sample samples say script second seconds see seem seems set setting settings several sft should
show showing shows simply since so solve solved some somebody somehow someone something sometimes
somewhere soon stage stage1 stage2 stage3 started step steps still strange suddenly sure take taken
takes test tested than thanks that the their them then there these they thing think third this
though thought through tiny to too torch train trained trainer training trains transformers trl try
tuning two unable under unless unsure until up use used using value values versus very via vs want
was way we weird well were what when where which while who whole why will with within without work
worked works would write writes written yet you your zero zero1 zero2 zero3
"""

#: With one of these, a question is of something else, unless the row speaks of it, too.
_ELSEWHERE = """
autotp batch_size bitsandbytes conda cuda cudnn curriculum dataloader dataloaders deepcompile disk
docker download downloading driver elastic elsewhere ethernet flash flash-attn gguf hpz
hyperparameter inference inferencing infiniband install installation installing jax keras
kubernetes learning mac megatron memory muon nccl nebula network nvme ollama onebit onnx oom pip
pipeline profiler quantization quantize quantized ray scheduler serving sglang slow slurm ssh
superoffload tensorflow tokenize tokenizer tokenizers tpu ulysse universal vllm window zenflow
"""
COMMON, ELSEWHERE = frozenset(_COMMON.split()), frozenset(_ELSEWHERE.split())
