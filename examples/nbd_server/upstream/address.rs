//! The address of an upstream export: an NBD URI as in `doc/uri.md` of the NBD project and in
//! libnbd.
//!
//! ```text
//!  nbd://HOST[:PORT]/EXPORT          nbd+unix:///EXPORT?socket=PATH
//!  nbds://HOST[:PORT]/EXPORT         nbds+unix:///EXPORT?socket=PATH&tls-hostname=NAME
//!      ?tls-certificates=DIR         ca-cert.pem; client-cert.pem and client-key.pem if present
//! ```

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::str::FromStr;

/// The default TCP port of NBD.
const PORT: u16 = 10809;

/// An export of another server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(super) endpoint: Endpoint,
    /// The name of the export; empty for the default export.
    pub(super) export: String,
    pub(super) tls: Option<TlsOptions>,
}

/// The socket address of the server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Endpoint {
    Tcp { host: String, port: u16 },
    Unix(PathBuf),
}

/// The names and certificates of a TLS connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TlsOptions {
    pub(super) certificates: PathBuf,
    /// The name that the server's certificate must have.
    pub(super) host: String,
}

impl Address {
    /// Returns whether the value of `--image` is an NBD URI.
    pub(crate) fn is_uri(text: &str) -> bool {
        ["nbd://", "nbds://", "nbd+unix://", "nbds+unix://"].iter().any(|s| text.starts_with(s))
    }

    /// A hash that is equal for equal endpoints and exports.
    pub(super) fn identity(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (&self.endpoint, &self.export).hash(&mut hasher);
        hasher.finish()
    }

    /// The export's name; empty for the default export.
    pub(crate) fn export(&self) -> &str {
        &self.export
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = |what: &str| format!("'{text}': {what}");
        let (scheme, rest) = text.split_once("://").ok_or_else(|| bad("not an NBD URI"))?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let export = decode(path).ok_or_else(|| bad("the export's name is not UTF-8"))?;
        let (mut socket, mut certificates, mut host) = (None, None, None);
        for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
            let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            let value = decode(value).ok_or_else(|| bad("a parameter is not UTF-8"))?;
            match name {
                "socket" => socket = Some(PathBuf::from(value)),
                "tls-certificates" => certificates = Some(PathBuf::from(value)),
                "tls-hostname" => host = Some(value),
                _ => return Err(bad(&format!("unknown parameter '{name}'"))),
            }
        }
        let unix = matches!(scheme, "nbd+unix" | "nbds+unix");
        let endpoint = match (unix, socket) {
            (true, Some(path)) if authority.is_empty() => Endpoint::Unix(path),
            (true, _) => return Err(bad("it needs no host, and a parameter socket=PATH")),
            (false, None) => tcp(authority).ok_or_else(|| bad("it needs HOST or HOST:PORT"))?,
            (false, Some(_)) => return Err(bad("socket=PATH belongs to nbd+unix")),
        };
        let tls = match scheme {
            "nbd" | "nbd+unix" => None,
            "nbds" | "nbds+unix" => {
                let host = host.or(match &endpoint {
                    Endpoint::Tcp { host, .. } => Some(host.clone()),
                    Endpoint::Unix(_) => None,
                });
                let certificates =
                    certificates.ok_or_else(|| bad("it needs tls-certificates=DIR"))?;
                let host = host.ok_or_else(|| bad("it needs tls-hostname=NAME"))?;
                Some(TlsOptions { certificates, host })
            }
            _ => return Err(bad("the scheme is not nbd, nbds, nbd+unix or nbds+unix")),
        };
        Ok(Self { endpoint, export, tls })
    }
}

fn tcp(authority: &str) -> Option<Endpoint> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']')?;
            (host, if rest.is_empty() { None } else { Some(rest.strip_prefix(':')?) })
        }
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    let port = port.map_or(Some(PORT), |port| port.parse().ok())?;
    (!host.is_empty()).then(|| Endpoint::Tcp { host: host.to_owned(), port })
}

/// Decodes `%XX`. `None` if a digit is missing or the result is not UTF-8.
fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, behind)) = rest.split_first() {
        rest = behind;
        bytes.push(if first == b'%' {
            let digits = rest.split_at_checked(2)?;
            rest = digits.1;
            u8::from_str_radix(std::str::from_utf8(digits.0).ok()?, 16).ok()?
        } else {
            first
        });
    }
    String::from_utf8(bytes).ok()
}

/// The URI without the parameters of TLS.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let secure = if self.tls.is_some() { "s" } else { "" };
        let export = &self.export;
        match &self.endpoint {
            Endpoint::Tcp { host, port } if host.contains(':') => {
                write!(f, "nbd{secure}://[{host}]:{port}/{export}")
            }
            Endpoint::Tcp { host, port } => write!(f, "nbd{secure}://{host}:{port}/{export}"),
            Endpoint::Unix(path) => {
                write!(f, "nbd{secure}+unix:///{export}?socket={}", path.display())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Address {
        text.parse().unwrap()
    }

    #[test]
    fn uris_name_hosts_sockets_and_exports() {
        for (text, shown) in [
            ("nbd://localhost", "nbd://localhost:10809/"),
            ("nbd://10.0.0.1:7/a/b%20c", "nbd://10.0.0.1:7/a/b c"),
            ("nbd://[::1]/x", "nbd://[::1]:10809/x"),
            ("nbd://[::1]:9/x", "nbd://[::1]:9/x"),
            ("nbd+unix:///disk?socket=/tmp/a%3Fb", "nbd+unix:///disk?socket=/tmp/a?b"),
            ("nbd+unix://?socket=s", "nbd+unix:///?socket=s"),
            ("nbds://host/?tls-certificates=/etc/pki", "nbds://host:10809/"),
        ] {
            assert_eq!(parse(text).to_string(), shown);
        }
        let tls = parse("nbds+unix:///?socket=s&tls-certificates=d&tls-hostname=h").tls.unwrap();
        assert_eq!((tls.certificates, tls.host.as_str()), (PathBuf::from("d"), "h"));
        assert_eq!(parse("nbd://h/x").identity(), parse("nbd://h:10809/x").identity());
        assert_ne!(parse("nbd://h/x").identity(), parse("nbd://h/y").identity());
    }

    #[test]
    fn what_is_missing_or_unknown_is_named() {
        for (bad, named) in [
            ("nbd:/x", "not an NBD URI"),
            ("http://h/", "scheme"),
            ("nbd:///x", "HOST"),
            ("nbd://h:x/", "HOST"),
            ("nbd://[::1/", "HOST"),
            ("nbd+unix:///x", "socket=PATH"),
            ("nbd+unix://h/x?socket=s", "no host"),
            ("nbd://h/?socket=s", "nbd+unix"),
            ("nbd://h/?size=1", "'size'"),
            ("nbd://h/%f", "UTF-8"),
            ("nbds://h/", "tls-certificates"),
            ("nbds+unix:///?socket=s&tls-certificates=d", "tls-hostname"),
        ] {
            let error = bad.parse::<Address>().unwrap_err();
            assert!(error.contains(named), "{bad}: {error}");
        }
    }
}
