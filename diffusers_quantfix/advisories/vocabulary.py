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
        "silently dropped|same with and without|identical|same image as|no change",
        "stays": "not freed|not be freed|not released|not be released|still occupied|"
        "not release|never released|cannot free|can't free|un-freeable|unfreeable|"
        "memory leak|out of memory|stays full|cannot remove|can not be moved back|"
        "cannot be moved back|on the gpu|remain in vram|on the old device",
        "mismatch": "same device|device mismatch|different device|wrong device|two devices",
        "fails": "not supported|unsupported|not work|n't work|can't|cannot|can not|unable to|won't|no longer",
        "secondgpu": "second gpu|second card|another gpu|other gpu|multi-gpu|multi gpu|multiple gpus|two gpus|cuda:1",
        "unrestored": "not what it was|not the same as before|further from|not restore|"
        "not give these weights back|not restored",
        "modeloffload": "model offload|model_cpu_offload",
        "devicemap": "device_map|device map",
        "frompipe": "from_pipe",
        "singlefile": "single_file|single file",
        "slow": "takes minutes|too long|so long|times longer|a long time|takes long|takes forever",
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
        "gibberish nonsense nonsensical incoherent corrupt corrupted corrupts corrupting rauschen verrauscht ruido "
        "bruit",
        "slow": "slow slower slowly slowdown slowness quadratic langsam langsamer lento lenta lentos lent lente",
        "stays": "leak leaks leaking oom freed free release released unreleased",
        "noeffect": "ignored ignores useless unchanged",
        "fails": "fail fails failed failing failure error errors crash crashes crashed crashing refuse refuses refused "
        "break breaks breaking incompatible cannot raises raise unsupported fehler scheitert falla fallan erreur",
        "cache": "caches pyramid fastercache firstblockcache teacache",
        "transformerslibrary": "transformers",
        "mismatch": "mismatch mismatched",
        "unrestored": "restore restores restored drift drifts drifting",
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
        "move": "move moved moves moving movement placement placed transfer transferred verschieben verschoben mover",
        "picture": "image images picture pictures photo bild bilder bildgenerierung imagen imagenes",
        "memory": "vram memory ram speicher grafikspeicher memoria mémoire memoire",
    }.items()
    for word in words.split()
}

# Words and stems of other languages, in lower case: Chinese, Japanese, Korean, Russian, German, Spanish, French.
_CONCEPTS: dict[str, str] = {
    "quantized": "量化|量子化|양자화|квант|quantisier|cuantiz|quantifi",
    "memory stays": "无法释放|不会释放|没释放|不释放显存|显存不释放|没有释放|不释放|未释放|释放不了|"
    "显存泄漏|内存泄漏|一直占|降不下来|解放されない|解放されません|メモリリーク|残ったまま|"
    "해제되지|해제가 안|남아 있|не освобожда|остаётся|остается|утечк|nicht freigegeben|"
    "nicht frei|bleibt belegt|bleibt auf|speicherleck|no se libera|no libera|sigue ocupad|"
    "pas libéré|jamais libéré|reste occupé|fuite",
    "memory": "显存|显卡内存|内存|显卡|メモリ|메모리|видеопамят|памят|grafikspeicher|speicher|"
    "memoria|mémoire",
    "slow": "变慢|很慢|非常慢|太慢|慢|遅い|遅く|遅|느려|느리|오래 걸|медленн|медленне|тормоз|"
    "langsam|dauert|lento|lenta|lentos|lentement|lente",
    "noise": "噪点|噪声|噪音|雪花|花屏|乱码|全黑|黑图|黑屏|ノイズ|砂嵐|真っ黒|노이즈|검은 화면|깨진|"
    "шум|чёрн|черн|мусор|rauschen|verrauscht|schwarz|ruido|negra|bruit|noire",
    "noeffect": "没有区别|没有效果|没效果|无效果|不起作用|没有作用|不生效|无效|没变化|効果がない|"
    "効かない|反映されない|変わらない|효과가 없|적용되지|적용이 안|변화가 없|не влия|нет эффект|"
    "не действ|не применя|keine wirkung|wirkungslos|ohne wirkung|ändert nichts|ningún efecto|"
    "sin efecto|no cambia|aucun effet|sans effet|ne change rien",
    "fails": "报错|出错|错误|失败|不支持|不能|无法|崩溃|エラー|失敗|できない|できません|落ちる|"
    "サポートされていません|サポートされない|오류|에러|실패|안 됩|안돼|ошибк|падает|не работа|"
    "не удаётся|не удается|не поддержива|fehler|scheitert|stürzt ab|geht nicht|lässt sich nicht|"
    "falla|no puedo|no funciona|erreur|échoue|impossible|ne marche pas",
    "mismatch": "设备不一致|不同设备|不在同一|设备不匹配|デバイスが異な|デバイスが違|別のデバイス|"
    "다른 장치|장치가 다|разных устройств|на другом устройств|anderem gerät|"
    "verschiedenen geräten|distintos dispositivos|appareils différents",
    "secondgpu": "第二张|第二块|多卡|多gpu|2枚目|複数gpu|두 번째 gpu|второй видеокарт|zweiten karte|"
    "zweite gpu|segunda gpu|deuxième carte",
    "load": "加载|载入|读取|読み込|ロード|불러|로드|загруз|geladen|lädt|cargar|charger|chargement",
    "save": "保存|저장|сохран|abspeichern|speichern|guardar|guardo|enregistr|sauvegard",
    "checkpoint missing": "缺少|見つからない",
    "shard": "分片|几个文件|多个文件|複数のファイル|여러 파일|нескольких файл|несколько файл|"
    "mehrere dateien|varios archivos",
    "8bit": "8位|8ビット|8비트|8-бит|8 бит|8 bits",
    "4bit": "4位|4ビット|4비트|4-бит|4 бит|4 bits",
    "tocpu": "移到了 cpu|移到 cpu|移到cpu|移到了cpu|cpuに移しても|cpuに移す|cpuへ移|cpu로 옮|на cpu|"
    "на процессор|auf die cpu|a la cpu|vers le cpu|sur le cpu",
    "move": "移动|移到|移して|移すと|移しても|移す|옮기|перенос|перенес|перемещ|verschieben|"
    "verschob|mover|déplac",
    "sequential": "顺序|逐层|シーケンシャル|순차|последовательн|sequenziell|secuencial|séquentiel",
    "group": "分组|组卸载|グループ|그룹|группов|gruppen",
    "offload": "卸载|オフロード|오프로드|выгруз|auslager|descarg|décharg",
    "fuse": "融合|合并|マージ|병합|слия|объедин|verschmelz|fusionn",
    "train": "训练|微调|学習|학습|훈련|обуч|trainier|entren|entraîn",
    "picture": "图片|图像|出图|画像|이미지|картин|изображ|bilder|bild|imagen|imágenes",
    "textencoder": "文本编码器|テキストエンコーダ|텍스트 인코더|текстовый энкодер|"
    "текстового энкодер|textencoder|codificador de texto|encodeur de texte",
    "copy": "深拷贝|拷贝|复制|コピー|복사|копия|копир|kopie|copia",
}
_CONCEPT = {word: f" {term} " for term, words in _CONCEPTS.items() for word in words.split("|")}


def _any(words: list[str]) -> str:
    """A pattern; the longest word first, as one may hold another."""
    return "|".join(map(re.escape, sorted(words, key=len, reverse=True)))


# Words of an alphabet stand at the start of a word; Chinese, Japanese and Korean ones anywhere.
_ALPHABETS = "\u0500"
_FOREIGN = re.compile(
    r"\b(?:"
    + _any([word for word in _CONCEPT if word[0] < _ALPHABETS])
    + ")|"
    + _any([word for word in _CONCEPT if word[0] >= _ALPHABETS])
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


def translated(text: str) -> str:
    """A text with what other languages say replaced by our terms."""
    return (
        _FOREIGN.sub(lambda found: _CONCEPT[found.group()], text.lower())
        if _FOREIGN.search(text.lower())
        else text
    )


def terms(text: str) -> set[str]:
    """The terms of a text: synonyms are one term, endings are dropped, names with underscores are split."""
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
