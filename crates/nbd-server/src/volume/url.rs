//! The address of a volume.

use crate::values::{parse_size, uri};

/// The address of a volume: `s3://BUCKET/PATH[?size=BYTES&snapshot=NAME]`, also `gs`, `az`, `file` and
/// `memory`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VolumeUrl {
    /// The address without the options, for messages and the log. It has no secrets, because
    /// credentials come from the environment.
    pub(crate) address: String,
    pub(crate) scheme: Scheme,
    pub(crate) bucket: String,
    /// The path of the volume below the bucket, or of the folder.
    pub(crate) path: String,
    pub(crate) size: Option<u64>,
    pub(crate) snapshot: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scheme {
    S3,
    Google,
    Azure,
    File,
    Memory,
}

/// Why an address with `@` is refused.
pub(crate) const CREDENTIALS: &str = "an address of a volume has no credentials: they come from the environment \
                                      (AWS_ACCESS_KEY_ID ...)";

impl VolumeUrl {
    /// The most bytes of a volume: as many as the cache can number.
    pub(crate) const MOST: u64 = 1 << 57;

    /// Parses an address. Returns `None` if it is no URI, but a path.
    pub(crate) fn parse(text: &str) -> Option<Result<Self, String>> {
        uri(text).map(|(scheme, rest)| Self::of(scheme, rest))
    }

    fn of(scheme: &str, rest: &str) -> Result<Self, String> {
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        if rest.contains('@') && scheme != "file" {
            return Err(CREDENTIALS.into());
        }
        let parsed = match scheme {
            "s3" => Scheme::S3,
            "gs" => Scheme::Google,
            "az" => Scheme::Azure,
            "file" => Scheme::File,
            "memory" => Scheme::Memory,
            _ => {
                return Err(format!(
                    "'{scheme}://' is a URI of no object store: s3, gs, az, file or memory"
                ));
            }
        };
        let (bucket, path) = match parsed {
            Scheme::File if place.starts_with('/') => ("", place),
            Scheme::File => return Err(format!("'file://{place}': the path must begin with '/'")),
            Scheme::Memory => ("", place.trim_matches('/')),
            _ => place.split_once('/').unwrap_or((place, "")),
        };
        let path = path.trim_end_matches('/');
        if path.is_empty() && parsed != Scheme::Memory {
            return Err(format!("'{scheme}://{place}' names no volume: {scheme}://BUCKET/VOLUME"));
        }
        if bucket.is_empty() && !matches!(parsed, Scheme::File | Scheme::Memory) {
            return Err(format!("'{scheme}://{place}' names no bucket"));
        }
        let address = format!("{scheme}://{}", place.trim_end_matches('/'));
        let (bucket, path) = (bucket.to_owned(), path.to_owned());
        let mut url = Self { address, scheme: parsed, bucket, path, size: None, snapshot: None };
        for option in query.split('&').filter(|option| !option.is_empty()) {
            match option.split_once('=') {
                Some(("size", "0")) => return Err("a volume with size=0 has no bytes".into()),
                Some(("size", bytes)) => {
                    url.size = Some(parse_size(bytes)?);
                    if url.size > Some(Self::MOST) {
                        return Err(format!("a volume has at most {}T", Self::MOST >> 40));
                    }
                }
                Some(("snapshot", name)) => url.snapshot = Some(snapshot_name(name)?),
                _ => {
                    return Err(format!(
                        "'{option}' is no option of a volume: size=BYTES or snapshot=NAME"
                    ));
                }
            }
        }
        if url.size.is_some() && url.snapshot.is_some() {
            return Err("a snapshot has the size that its volume had: size= says nothing".into());
        }
        Ok(url)
    }

    /// Returns the last part of the path, the name of the export.
    pub(crate) fn name(&self) -> &str {
        self.address.rsplit('/').next().unwrap_or_default()
    }

    /// Returns whether the store is a folder, which has no conditional overwrites.
    pub(crate) fn is_local(&self) -> bool {
        self.scheme == Scheme::File
    }
}

/// Checks the name of a snapshot, which is a part of an address.
pub(crate) fn snapshot_name(text: &str) -> Result<String, String> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte);
    match (1..=100).contains(&text.len()) && text.bytes().all(is_plain) {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "'{text}' is no name of a snapshot: letters, digits, '-', '_', '.' and ':'"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_volumes_are_parsed_or_say_what_is_wrong() {
        let parse = |text| VolumeUrl::parse(text).unwrap();
        let url = parse("s3://bucket/a/b?size=100G").unwrap();
        assert_eq!((&*url.bucket, &*url.path, url.size), ("bucket", "a/b", Some(100 << 30)));
        assert_eq!((url.name(), &*url.address), ("b", "s3://bucket/a/b"));
        let url = parse("file:///mnt/v/?snapshot=x").unwrap();
        assert_eq!((&*url.path, url.snapshot.as_deref()), ("/mnt/v", Some("x")));
        assert!(parse("memory:///v?size=1M").is_ok());
        assert_eq!(parse("file:///mnt/a@b/v").unwrap().path, "/mnt/a@b/v");
        assert!(VolumeUrl::parse("disk.img").is_none() && VolumeUrl::parse("a b://c").is_none());
        for (text, named) in [
            ("http://host/v", "object store"),
            ("s3://bucket", "names no volume"),
            ("s3:///v", "names no bucket"),
            ("s3://key:secret@bucket/v", "credentials"),
            ("file://v", "begin with '/'"),
            ("s3://b/v?size=0", "no bytes"),
            ("s3://b/v?size=x", "not a size"),
            ("s3://b/v?size=131073T", "at most"),
            ("s3://b/v?colour=red", "'colour=red'"),
            ("s3://b/v?size=1G&snapshot=x", "snapshot"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(named) && !error.contains("secret"), "{text}: {error}");
        }
    }
}
