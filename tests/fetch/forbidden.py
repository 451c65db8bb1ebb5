"""Forms of forbidden addresses and refused URLs, found in use or in standards."""

from __future__ import annotations

ADDRESSES = """
0.0.0.0 0.1.2.3 10.0.0.1 100.64.0.1 127.0.0.1 127.255.255.254 168.63.129.16 169.254.169.254
172.16.0.1 172.31.255.255 192.0.0.1 192.0.2.1 192.88.99.1 192.168.1.1 198.18.0.1 198.51.100.1
203.0.113.1 224.0.0.1 239.255.255.250 240.0.0.1 255.255.255.255
:: ::1 ::2 ::127.0.0.1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:169.254.169.254
64:ff9b::7f00:1 64:ff9b::a9fe:a9fe 64:ff9b:1::1 64:ff9b:1:7f00:0:100:: 2002:7f00:1:: 2002:a00:1::1
2001:0:1:2:3:4:5:6 2001:db8::1 3fff::1 5f00::1 100::1 fc00::1 fd00::1 fe80::1 fec0::1
ff02::1 ff0e::1
"""
HOSTS = """
127.0.0.1 2130706433 0x7f.1 0x7f000001 0177.0.0.1 017700000001 127.1 127.0.1
localhost localhost. LOCALHOST x.localhost
[::1] [::ffff:127.0.0.1] [::ffff:7f00:1] [0:0:0:0:0:0:0:1] [::127.0.0.1] [64:ff9b::7f00:1]
[2002:7f00:1::] \uff11\uff12\uff17.\uff10.\uff10.\uff11 127。0.0.1 ①②⑦.0.0.1
"""
SCHEMES = """
file:///etc/passwd gopher://example.com/ ftp://example.com/a.jpg data:image/png;base64,AAAA
jar:http://example.com!/ javascript:alert(1) //example.com/a.jpg example.com/a.jpg
"""
ODD_HOSTS = """
http:example.com http:///a.jpg http:// http://:80/ http://example%2ecom/ http://%31%32%37.0.0.1/
http://example..com/ http://.example.com/ http://-example.com/ http://example-.com/ http://[::1/
http://[v1.x]/ http://0x/ http://[fe80::1%25eth0]/ http://1.2.3/x/.. http://8.8.2056/
http://134744072/ http://1.2.3.4.5/ http://[8.8.8.8]/ http://[2606:4700::1111]x/
http://p\u0430ypal.com/ http://p\u03b1ypal.com/
"""
PORTS = "0 22 25 6379 65536 80a 000080 \uff18\uff10"
LONG_LABEL, LONG_NAME = "a" * 64 + ".com", "a." * 126 + "ab"
FORBIDDEN_ADDRESSES = ADDRESSES.split()
LOOPBACK_HOSTS = HOSTS.split()
REFUSED = {
    "scheme": [*SCHEMES.split(), "", " http://example.com/"],
    "host": [*ODD_HOSTS.split(), "http://a b.com/", f"http://{LONG_LABEL}/", f"http://{LONG_NAME}"],
    "userinfo": [f"http://{user}@example.com/" for user in ("", "user", "user:pw")],
    "syntax": [
        *(f"http://example.com/{sign}" for sign in ("\x00", "\x1f", "\x7f", "\ud800", "\r\nX: y")),
        *("http://example.com\\@127.0.0.1/", "http://exam\tple.com/"),
    ],
    "port": [f"http://example.com:{port}/" for port in (*PORTS.split(), "")],
    "length": ["http://example.com/" + "a" * 2030, "http://example.com/" + "\u044f" * 600],
}
