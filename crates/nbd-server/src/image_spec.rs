//! One `--image` of the command line: `[NAME=]PATH[,readonly]`.

use std::path::PathBuf;
use std::str::FromStr;

/// The export that an `--image` describes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ImageSpec {
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    /// Refuse commands that change the image.
    pub(crate) read_only: bool,
    /// A volume on an object store, in place of a file. `path` has its address.
    #[cfg(feature = "objects")]
    pub(crate) volume: Option<VolumeUrl>,
}

impl FromStr for ImageSpec {
    type Err = String;

    /// Parses an `--image`. As in QEMU's options, `,,` is a comma of the path. Without a name, the
    /// last part of the path is the name. `=` behind a `/` belongs to the path.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = parts(text).into_iter();
        let image = parts.next().unwrap_or_default();
        let mut spec = Self::default();
        match image.split_once('=') {
            Some((name, path)) if !name.contains('/') => {
                (spec.name, spec.path) = (name.to_owned(), path.into());
            }
            _ => {
                spec.path = PathBuf::from(&image);
                let name = spec.path.file_name().map(|name| name.to_string_lossy().into_owned());
                spec.name = name.unwrap_or_default();
            }
        }
        if spec.path.as_os_str().is_empty() {
            return Err(format!("'{text}' names no file"));
        }
        #[cfg(feature = "objects")]
        if let Some(url) = spec.path.to_str().and_then(VolumeUrl::parse).transpose()? {
            if spec.path.as_os_str() == &*image {
                spec.name = url.name().to_owned();
            }
            spec.path = PathBuf::from(&url.address);
            spec.volume = Some(url);
        }
        #[cfg(not(feature = "objects"))]
        if let Some((scheme, _)) = spec.path.to_str().and_then(uri) {
            return Err(format!(
                "'{scheme}://' begins a URI, and an image is a file or a block device of this machine; \
                 volumes on object stores need a server built with --features objects"
            ));
        }
        for option in parts {
            if option != "readonly" {
                return Err(format!(
                    "'{option}' is not an option: readonly; a comma of the path is written ',,'"
                ));
            }
            spec.read_only = true;
        }
        Ok(spec)
    }
}

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

#[cfg(feature = "objects")]
/// The address of a volume: `s3://BUCKET/PATH[?size=BYTES&snapshot=NAME]`, also `gs`, `az`, `file` and
/// `memory`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VolumeUrl {
    /// The address without the options, which is shown. It has no secrets: credentials come from
    /// the environment.
    pub(crate) address: String,
    pub(crate) scheme: Scheme,
    pub(crate) bucket: String,
    /// The path of the volume below the bucket, or of the folder.
    pub(crate) path: String,
    pub(crate) size: Option<u64>,
    pub(crate) snapshot: Option<String>,
}

#[cfg(feature = "objects")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scheme {
    S3,
    Google,
    Azure,
    File,
    Memory,
}

/// Returns the scheme of a URI and the rest.
fn uri(text: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = text.split_once("://")?;
    let is_scheme = |byte: u8| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte);
    scheme.bytes().all(is_scheme).then_some((scheme, rest))
}

#[cfg(feature = "objects")]
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
            return Err(
                "an address of a volume has no credentials: they come from the environment \
                        (AWS_ACCESS_KEY_ID ...)"
                    .into(),
            );
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

    /// Returns whether the store lacks overwrites under a condition.
    pub(crate) fn is_local(&self) -> bool {
        self.scheme == Scheme::File
    }
}

#[cfg(feature = "objects")]
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

/// Splits at single commas. A double comma becomes a single one.
fn parts(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut chars = text.chars().peekable();
    while let Some(char) = chars.next() {
        if char == ',' && chars.next_if_eq(&',').is_none() {
            parts.push(String::new());
        } else {
            parts.last_mut().expect("there is one").push(char);
        }
    }
    parts
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

    #[test]
    fn names_come_from_the_argument_or_the_file() {
        let split = |image: &str| {
            let spec: ImageSpec = image.parse().unwrap();
            (spec.name, spec.path.to_str().unwrap().to_owned())
        };
        assert_eq!(split("/a/disk.img"), ("disk.img".into(), "/a/disk.img".into()));
        assert_eq!(split("root=/a/disk.img"), ("root".into(), "/a/disk.img".into()));
        assert_eq!(split("/a=b/disk"), ("disk".into(), "/a=b/disk".into()));
        assert_eq!(split("/"), (String::new(), "/".into()));
        assert_eq!(split("a,,b,,,,c"), ("a,b,,c".into(), "a,b,,c".into()));
    }

    #[cfg(feature = "objects")]
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

    #[cfg(feature = "objects")]
    #[test]
    fn a_volume_has_the_name_of_its_last_part() {
        let parse = |text: &str| text.parse::<ImageSpec>();
        let spec = parse("s3://bucket/a/vol?size=1G,readonly").unwrap();
        assert_eq!((&*spec.name, spec.read_only), ("vol", true));
        assert_eq!(spec.volume.and_then(|url| url.size), Some(1 << 30));
        assert_eq!(parse("root=file:///srv/v?size=1G").unwrap().name, "root");
        assert!(parse("file:///v,size=1M").unwrap_err().contains("'size=1M'"));
    }

    #[test]
    fn options_follow_the_path() {
        let spec: ImageSpec = "boot=disk,,1.img,readonly".parse().unwrap();
        let expected = ImageSpec {
            name: "boot".into(),
            path: "disk,1.img".into(),
            read_only: true,
            #[cfg(feature = "objects")]
            volume: None,
        };
        assert_eq!(spec, expected);
        for (bad, named) in [
            ("a,b.img", "'b.img'"),
            ("a,", "''"),
            ("a,size=5", "'size=5'"),
            ("a,readonly=1", "readonly=1"),
        ] {
            let error = bad.parse::<ImageSpec>().unwrap_err();
            assert!(error.contains(named), "{bad}: {error}");
        }
    }
}
