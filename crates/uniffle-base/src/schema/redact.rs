//! Removes passwords, secret keys and tokens from values before they are shown.
//!
//! The printed configuration, the HTTP port and error texts all use this module. Names of settings
//! decide which values are secret, in tables and in text of the form `k=v,k=v`. In URLs the part
//! before the `@` is removed if it can contain a password.

use toml::{Table, Value};

/// Replaces a secret.
pub const REMOVED: &str = "<removed>";

const SECRET_NAMES: [&str; 8] =
    ["password", "passwd", "secret", "token", "credential", "account.key", "access.key", "authorization"];

/// A key that names the source of the credentials and is not a secret itself.
const NO_SECRET: &str = "object.store.credentials";

/// Returns whether the value of `name` is secret. The path of a file with a secret is not.
pub fn is_secret(name: &str) -> bool {
    let name = name.trim().to_ascii_lowercase().replace(['_', '-'], ".");
    if name == NO_SECRET {
        return false;
    }
    let is_place = [".file", ".path", ".provider"].iter().any(|end| name.ends_with(end));
    !is_place
        && (SECRET_NAMES.iter().any(|part| name.contains(part))
            || name.contains("accountkey")
            || name.contains("accesskey"))
}

/// Returns the value of `name` with secrets removed.
pub fn value(name: &str, value: &Value) -> Value {
    match value {
        _ if is_secret(name) => Value::from(REMOVED),
        Value::Table(table) => {
            let shown = table.iter().map(|(name, within)| (name.clone(), self::value(name, within)));
            Value::Table(shown.collect::<Table>())
        }
        Value::Array(values) => Value::Array(values.iter().map(|within| self::value("", within)).collect()),
        Value::String(written) => Value::from(text(written)),
        other => other.clone(),
    }
}

/// Returns `text`, which may contain settings `k=v` and URLs, with secrets removed.
pub fn text(text: &str) -> String {
    without_userinfo(&without_settings(text))
}

/// Removes the values of secret settings.
///
/// An unquoted secret is removed up to the end of its line. It may contain commas, and text after a
/// comma that looks like the next setting.
fn without_settings(text: &str) -> String {
    let (mut shown, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(at) = rest.find(['=', ':']) {
        let (before, after) = rest.split_at(at + 1);
        shown.push_str(before);
        rest = after;
        let name = before[..at].trim_end().trim_end_matches(['"', '\'']);
        let begin = name.rfind(|c: char| !is_of_name(c)).map_or(0, |at| at + 1);
        // A scheme and its colon precede a URL, not a value.
        let is_scheme = before.ends_with(':') && after.starts_with("//");
        if !is_secret(&name[begin..]) || is_scheme {
            continue;
        }
        let value = after.trim_start_matches([' ', '\t']);
        let length = value_length(value);
        if length > 0 {
            shown.push_str(&after[..after.len() - value.len()]);
            shown.push_str(REMOVED);
        }
        rest = &value[length..];
    }
    shown + rest
}

fn is_of_name(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '.' | '-' | '_')
}

/// Returns the length of the secret at the beginning of `text`, including quotes.
fn value_length(text: &str) -> usize {
    let line = text.find('\n').unwrap_or(text.len());
    for quotes in ["\"\"\"", "'''"] {
        if let Some(within) = text.strip_prefix(quotes) {
            return within.find(quotes).map_or(text.len(), |at| up_to_delimiter(text, at + 2 * quotes.len()));
        }
    }
    let Some(quote) = text.chars().next().filter(|c| matches!(c, '"' | '\'')) else { return line };
    let mut is_escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            c if c == quote => return up_to_delimiter(text, at + 1),
            _ => {}
        }
    }
    line
}

/// Returns `end` if a delimiter follows the closing quote, or else the end of the line.
fn up_to_delimiter(text: &str, end: usize) -> usize {
    let rest = &text[end..];
    let is_end = rest.chars().next().is_none_or(|c| c.is_whitespace() || ",;:)]}`".contains(c));
    if is_end { end } else { end + rest.find('\n').unwrap_or(rest.len()) }
}

/// Removes user information from URLs, and from words that look like a mistyped URL.
fn without_userinfo(text: &str) -> String {
    let is_end = |c: char| c.is_whitespace() || matches!(c, '"' | '\'' | '`');
    text.split_inclusive(is_end).map(word_without_userinfo).collect()
}

fn word_without_userinfo(word: &str) -> String {
    let mut parts = word.split("://");
    let first = parts.next().unwrap_or_default();
    if first.len() == word.len() {
        // `user:password@host`; a principal `user/host@REALM` has no colon.
        return match word.rfind('@') {
            Some(at) if word[..at].contains(':') => format!("{REMOVED}{}", &word[at..]),
            _ => word.to_owned(),
        };
    }
    let mut shown = first.to_owned();
    let mut scheme = first;
    for part in parts {
        shown.push_str("://");
        match userinfo_length(scheme, part) {
            0 => shown.push_str(part),
            length => {
                shown.push_str(REMOVED);
                shown.push_str(&part[length..]);
            }
        }
        scheme = part;
    }
    shown
}

/// Returns the length of the user information in a URL without its scheme.
/// `abfs://container@account` and `hdfs://user@host` contain no secret.
fn userinfo_length(scheme: &str, rest: &str) -> usize {
    let authority = &rest[..rest.find(['/', '?', '#']).unwrap_or(rest.len())];
    let is_web = scheme.ends_with("http") || scheme.ends_with("https");
    if let Some(at) = authority.rfind('@') {
        return if is_web || authority[..at].contains(':') { at } else { 0 };
    }
    // The password contains an unescaped slash if the text after the colon is not a port.
    let is_port = |text: &str| text.chars().all(|c| c.is_ascii_digit());
    match authority.split_once(':') {
        Some((_, port)) if !is_port(port) => rest.rfind('@').unwrap_or(0),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_recognised_by_name() {
        for name in [
            "fs.s3a.secret.key",
            "fs.s3a.access.key",
            "fs.s3a.session.token",
            "rss.client.password",
            "fs.azure.account.key.a.blob.core.windows.net",
            "rss.http.basic.authorizationCredentials",
            "AWS_SECRET_ACCESS_KEY",
        ] {
            assert!(is_secret(name), "{name}");
        }
        for name in [
            "admin.token_file",
            "tls.key_file",
            "store_type",
            "rss.x.y",
            "fs.defaultFS",
            "max_keys",
            "object_store.credentials",
            "object_store.credentials_file",
        ] {
            assert!(!is_secret(name), "{name}");
        }
    }

    #[test]
    fn secrets_of_settings_in_text_are_removed() {
        for (text, shown) in [
            ("a=b,c=d", "a=b,c=d"),
            ("a=b,fs.s3a.secret.key=p,q,c=d", "a=b,fs.s3a.secret.key=<removed>"),
            ("a=b;x.token=p;q;c=d\nc=d", "a=b;x.token=<removed>\nc=d"),
            ("x.token = abc", "x.token = <removed>"),
            ("x.token=", "x.token="),
            ("{ \"my.password\" = \"a\\\"b\", c = 1 }", "{ \"my.password\" = <removed>, c = 1 }"),
            ("2 | \"my.password\" = \"half\n  | ^", "2 | \"my.password\" = <removed>\n  | ^"),
            ("secret.key:abc", "secret.key:<removed>"),
            ("tls.key_file = /x: no such file", "tls.key_file = /x: no such file"),
        ] {
            assert_eq!(self::text(text), shown);
        }
    }

    #[test]
    fn secret_is_hidden_whatever_it_contains() {
        for secret in [
            "hush",
            "//hush",
            "a,hush",
            "a,b=hush",
            "a, \"b\" = hush",
            "a;b.c=hush,d=hush",
            "a b:hush",
            "a=hush",
            "\"a,b=hush\"",
            "\"a\"hush",
            "\"a\"\"hush\"",
            "'it''s hush'",
            "\"a\\\",b=hush\"",
            "'hush",
            "\"a\nhush\"",
            "\"\"\"a\nhush\"\"\"",
            "'''a\nhush",
        ] {
            for before in ["my.password=", "my.password = ", "\"my.password\": ", "x=1,my.password="] {
                let shown = text(&format!("{before}{secret}"));
                assert!(
                    !shown.contains("hush") && shown.contains(REMOVED),
                    "{before}{secret} was shown as {shown}"
                );
            }
        }
    }

    #[test]
    fn only_url_passwords_are_removed() {
        for (text, shown) in [
            ("http://u:p@host:1/x", "http://<removed>@host:1/x"),
            ("http://u:p@ss@host", "http://<removed>@host"),
            ("\"https://token@host\"", "\"https://<removed>@host\""),
            ("http://u:p/w@host/x", "http://<removed>@host/x"),
            ("u:p@host:9091", "<removed>@host:9091"),
            ("http://a:1,http://u:p@b", "http://a:1,http://<removed>@b"),
            ("s3a://KEY:SECRET@bucket/x", "s3a://<removed>@bucket/x"),
            ("abfs://container@account/x", "abfs://container@account/x"),
            ("hdfs://ns:8020/a@b", "hdfs://ns:8020/a@b"),
            ("rss/_HOST@REALM", "rss/_HOST@REALM"),
        ] {
            assert_eq!(self::text(text), shown);
        }
    }

    #[test]
    fn secrets_within_tables_and_lists_are_removed() {
        let table: Table =
            "a = { \"x.secret\" = 5, y = \"z\" }\nb = [\"k.token=1\"]\nc = { nn = \"my.password=p\" }"
                .parse()
                .unwrap();
        let shown = value("", &Value::Table(table)).to_string();
        for part in
            ["\"x.secret\" = \"<removed>\"", "y = \"z\"", "k.token=<removed>", "my.password=<removed>"]
        {
            assert!(shown.contains(part), "{part} is missing: {shown}");
        }
    }
}
