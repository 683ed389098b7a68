//! Values that options and addresses of volumes have in common: sizes and URIs.

/// Parses a number of bytes; K, M, G, T are powers of 1024.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.bytes().last().map(|last| last.to_ascii_uppercase()) {
        Some(b'K') => (&text[..text.len() - 1], 10),
        Some(b'M') => (&text[..text.len() - 1], 20),
        Some(b'G') => (&text[..text.len() - 1], 30),
        Some(b'T') => (&text[..text.len() - 1], 40),
        _ => (text, 0),
    };
    let number: u64 = digits.parse().map_err(|_| format!("'{text}' is not a size"))?;
    let size = number.checked_mul(1 << shift).filter(|&size| i64::try_from(size).is_ok());
    size.ok_or_else(|| format!("'{text}' is too large"))
}

/// Returns the scheme of a URI and the rest.
pub(crate) fn uri(text: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = text.split_once("://")?;
    let is_scheme = |byte: u8| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte);
    scheme.bytes().all(is_scheme).then_some((scheme, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_take_binary_suffixes() {
        assert_eq!(parse_size("4096"), Ok(4096));
        assert_eq!(parse_size("64M"), Ok(64 << 20));
        assert_eq!(parse_size("1t"), Ok(1 << 40));
        for bad in ["", "M", "-1", "1.5G", "9000000T", "18446744073709551615"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }
}
