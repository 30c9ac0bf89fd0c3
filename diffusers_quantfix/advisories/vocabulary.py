"""The terms that people use for these bugs: synonyms, and words of reports in other languages."""

from __future__ import annotations

import re

# What a report is about.  Two texts that name different values of one of these are about different bugs.
BACKENDS = frozenset({"4bit", "8bit", "bitsandbytes", "float8", "gguf", "quanto", "torchao", "int4"})
# What goes wrong.
TROUBLES = frozenset({"noise", "slow", "stays", "noeffect", "fails", "meta", "mismatch", "unrestored"})
# What the program does, or uses: a bug that needs one of these does not explain a report that names none.
ACTIONS = frozenset(
    re.findall(
        r"\w+",
        "lora fuse unfuse save copy pickle cast dequantize train shard adapter dora lokr loha oft vera vae textencoder "
        "inversion frompipe controlnet balanced layerwise cache hotswap singlefile diskpath compose qkv",
    )
)
# Where the weights are.
PLACES = frozenset({"sequential", "group", "modeloffload", "disk", "devicemap", "stream", "offload", "tocpu"})

KINDS = BACKENDS | TROUBLES | ACTIONS | PLACES

_PHRASES: tuple[tuple[str, str], ...] = tuple(
    (phrase, f" {term} ")
    for term, phrases in {
        "textencoder": "text encoder|text-encoder",
        "noeffect": "no effect|not take effect|without effect|does nothing|do nothing|not applied|not applying|"
        "not being applied|with and without|nothing changes|changes nothing|changes no weight|never change|"
        "no weight changes|seems the same|looks the same|is the same when|the same as without|no difference|"
        "silently dropped",
        "stays": "not freed|not be freed|not released|not be released|still occupied|"
        "not release|never released|cannot free|can't free|un-freeable|unfreeable|"
        "memory leak|out of memory|stays full|cannot remove|can not be moved back|"
        "cannot be moved back|on the gpu|remain in vram|on the old device",
        "mismatch": "same device|device mismatch|different device|wrong device|two devices",
        "fails": "not supported|unsupported|not work|n't work|can't|cannot|can not|unable to|won't|no longer",
        "unrestored": "not what it was|not restore|not give these weights back|not restored",
        "modeloffload": "model offload|model_cpu_offload",
        "devicemap": "device_map|device map",
        "frompipe": "from_pipe",
        "singlefile": "single_file|single file",
        "slow": "times as long|a long time|takes long|takes forever",
        "noise": "wrong output|wrong image|wrong picture|another output|another loss|wrong result|bad result|incorrect|"
        "bad image|is a mess",
        "tocpu": "to('cpu')|moved to cpu|moved to the cpu|move to cpu|moved back to cpu|back to cpu|"
        "move the pipe to cpu|"
        "to the cpu",
        "inversion": "textual inversion|textual_inversion",
        "adapter": "ip-adapter|ip_adapter|ip adapter",
        "4bit": "4-bit|4 bit|4位|4ビット",
        "8bit": "8-bit|8 bit|8位|8ビット",
        "checkpoint load": "loading it again|load it again|loaded it again|loaded again|loading again|after reloading|"
        "when reloading",
        "8bit bitsandbytes": "load_in_8bit",
        "4bit bitsandbytes": "load_in_4bit",
        "controlnet": "controlnet",
        "diskpath": "offload_to_disk_path",
        "quanto float8": "qfloat8_e4m3fn|qfloat8_e4m3|qfloat8",
    }.items()
    for phrase in phrases.split("|")
)

_SYNONYMS: dict[str, str] = {
    word: term
    for term, words in {
        "4bit": "nf4 fp4 params4bit linear4bit 4bits qlora",
        "8bit": "int8 linear8bit linear8bitlt int8params 8bits",
        "bitsandbytes": "bnb bits_and_bytes",
        "quanto": "qint8 qint4 qint2 optimum qbytes qbits",
        "float8": "fp8 e4m3fn e4m3",
        "torchao": "ao int8weightonly float8weightonly",
        "noise": "wrong wrongly noise noisy nan garbage garbled distorted artifacts black blurry static broken "
        "gibberish nonsense nonsensical corrupted rauschen verrauscht ruido bruit",
        "slow": "slow slower slowly slowdown slowness quadratic langsam langsamer lento lenta lentos lent lente",
        "stays": "leak leaks leaking oom freed free release released unreleased",
        "noeffect": "ignored ignores useless unchanged",
        "fails": "fail fails failed failing failure error errors crash crashes crashed refuse refuses refused break "
        "breaks incompatible cannot raises raise unsupported fehler scheitert falla fallan erreur",
        "cache": "caches pyramid fastercache firstblockcache teacache",
        "transformerslibrary": "transformers",
        "mismatch": "mismatch mismatched",
        "unrestored": "restore restores restored",
        "lora": "lora loras",
        "fuse": "fuse fused fuses fusing merge merged merging merges",
        "unfuse": "unfuse unfused unfusing unmerge unmerged",
        "save": "save saved saving saves resave",
        "copy": "copy copied copies deepcopy",
        "pickle": "pickle pickled pickling multiprocessing",
        "cast": "cast casts casting recast",
        "dequantize": "dequantize dequantized dequantizing dequantization",
        "train": "train training trained trains gradient gradients finetune finetuning",
        "shard": "fsdp fsdp2 fully_shard sharded",
        "vae": "vae autoencoder autoencoders decode",
        "sequential": "sequential sequentially",
        "offload": "offload offloads offloaded offloading",
        "disk": "disk",
        "stream": "stream streams",
        "load": "load loads loaded loading reload reloading from_pretrained",
        "quantiz": "quantized quantize quantization quantizing quantised quant quants quantisiert quantisierte "
        "quantisiertes quantisierten cuantizado cuantizada cuantizados cuantizar quantifié quantifie",
        "move": "move moved moves moving verschieben verschoben mover",
        "picture": "image images picture pictures photo bild bilder bildgenerierung imagen imagenes",
        "memory": "vram memory ram speicher grafikspeicher memoria mémoire memoire",
    }.items()
    for word in words.split()
}

# Longest first, as one may hold another.
_FOREIGN: tuple[tuple[str, str], ...] = tuple(
    sorted(
        (
            (word, f" {term} ")
            for term, words in {
                "quantized": "量化|量子化",
                "memory stays": "nicht freigegeben|nicht frei|bleibt belegt|no se libera|no libera|pas libérée|"
                "无法释放|不会释放|没释放|不释放显存|显存不释放|没有释放|不释放|未释放|释放不了|解放されない|解放されません|"
                "显存泄漏|"
                "内存泄漏|メモリリーク",
                "memory": "显存|显卡内存|内存|メモリ",
                "slow": "变慢|很慢|非常慢|慢|遅い|遅く|遅",
                "noise": "噪点|噪声|噪音|雪花|花屏|乱码|ノイズ|砂嵐|全黑|黑图|真っ黒",
                "noeffect": "keine Wirkung|wirkungslos|ohne Wirkung|ningún efecto|sin efecto|aucun effet|没有区别|"
                "没有效果|没效果|无效果|不起作用|没有作用|不生效|无效|効果がない|効かない|反映されない",
                "fails": "报错|出错|错误|失败|不支持|不能|无法|エラー|失敗|できない|"
                "サポートされていません|サポートされない",
                "load": "加载|载入|読み込み|読み込む|読み込んだ|ロード",
                "save": "保存",
                "checkpoint missing": "缺少",
                "shard": "分片|几个文件|多个文件",
                "8bit": "8-Bit|8 Bit|8 bits",
                "4bit": "4-Bit|4 Bit|4 bits",
                "tocpu": "auf die CPU|a la CPU|移到了 CPU|移到 CPU|移到CPU|移到了CPU|CPUに移しても|CPUに移す|CPUへ移",
                "move": "移动|移到|移して|移すと|移しても|移す",
                "sequential": "顺序|逐层|シーケンシャル",
                "group": "分组|组卸载|グループ",
                "offload": "卸载|オフロード",
                "fuse": "融合|合并|融合する|マージ",
                "train": "训练|微调|学習",
                "picture": "图片|图像|出图|画像",
                "textencoder": "文本编码器|テキストエンコーダ",
                "copy": "深拷贝|拷贝|复制|コピー",
            }.items()
            for word in words.split("|")
        ),
        key=lambda pair: -len(pair[0]),
    )
)

_CAMEL = re.compile(r"(?<=[A-Za-z][a-z]{2})(?=[A-Z][a-z]{3})")
_WORD = re.compile(r"[a-z0-9]+")
_DIGITS = re.compile(r"\d+")
_ENDINGS = ("ing", "ed", "es", "s")
_COMMON = frozenset(
    re.findall(
        r"\w+",
        "the and for not with that this from has are was were but does did its can when after before none error "
        "runtimeerror valueerror typeerror keyerror exception traceback most recent call last file line self "
        "model models pipe pipeline pipelines python torch diffusers have get got use using there then only "
        "all any some one two into which whose where been under over also out other another each every than both while "
        "although because how why what enable enabled call calls called run runs running weight weights layer layers "
        "tensor tensors module modules huggingface http https github com issue issues bug describe reproduction them "
        "they you your will would should could just like way still even work works working first second time times "
        "new now always never",
    )
)


def terms(text: str) -> set[str]:
    """The terms of a text: synonyms are one term, endings are dropped, names with underscores are split."""
    for word, term in _FOREIGN:
        if word in text:
            text = text.replace(word, term)
    text = _CAMEL.sub(" ", text).lower()
    for phrase, term in _PHRASES:
        if phrase in text:
            text = text.replace(phrase, term)
    return {
        term
        for word in _WORD.findall(text)
        if len(word) > 2 and word not in _COMMON and not _DIGITS.fullmatch(word) and (term := _term(word))
    }


def _term(word: str) -> str:
    known = _SYNONYMS.get(word)
    if known or word in KINDS:
        return known or word
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) >= len(ending) + 4:
            stem = word[: -len(ending)]
            return _SYNONYMS.get(stem) or stem
    return word
