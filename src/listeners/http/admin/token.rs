//! The bearer token. It is never shown, and the time of a comparison does not depend on its text.

use std::fmt;

use subtle::ConstantTimeEq as _;

/// Minimum length. 16 characters of base64 have 96 bits.
const CHARS_MIN: usize = 16;
/// Maximum length, which fits into a header line.
const CHARS_MAX: usize = 1024;

/// The secret of administration callers.
#[derive(Clone)]
pub struct Token(String);

/// The error for a text that is not a valid token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a token of {CHARS_MIN} to {CHARS_MAX} printable ASCII characters without blanks")]
pub struct InvalidToken;

impl Token {
    /// Parses a token. Surrounding white space is removed, such as the newline at the end of a
    /// file.
    ///
    /// # Errors
    /// [`InvalidToken`], which does not contain the text.
    pub fn parse(text: &str) -> Result<Self, InvalidToken> {
        let text = text.trim();
        let is_sound =
            (CHARS_MIN..=CHARS_MAX).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic());
        if is_sound { Ok(Self(text.to_owned())) } else { Err(InvalidToken) }
    }

    /// Returns whether `offered` is the token. The time depends on the lengths only.
    pub fn is(&self, offered: &[u8]) -> bool {
        self.0.as_bytes().ct_eq(offered).into()
    }
}

impl PartialEq for Token {
    fn eq(&self, other: &Self) -> bool {
        self.is(other.0.as_bytes())
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(hidden)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_long_printable_and_hidden() {
        let token = Token::parse(" 0123456789abcdef\n").unwrap();
        assert!(token.is(b"0123456789abcdef"));
        for wrong in ["0123456789abcdeg", "0123456789abcde", "0123456789abcdef0", ""] {
            assert!(!token.is(wrong.as_bytes()), "{wrong}");
        }
        assert!(!format!("{token:?}").contains("0123"));
        for bad in ["", "short", "0123456789 abcdef", "0123456789abcde\u{e9}", &"x".repeat(1025)] {
            assert_eq!(Token::parse(bad), Err(InvalidToken), "{bad}");
        }
    }
}
