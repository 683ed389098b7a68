//! One `--image` of the command line: `[NAME=]PATH[,OPTION..]`.

use std::path::PathBuf;
use std::str::FromStr;

#[cfg(feature = "objects")]
use crate::volume::VolumeUrl;

/// The export that an `--image` describes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ImageSpec {
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    /// Refuse commands that change the image.
    pub(crate) read_only: bool,
    /// The offset of the export in the file, in bytes.
    pub(crate) offset: u64,
    /// Length of the export in bytes; by default up to the end of the file.
    pub(crate) size: Option<u64>,
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
        #[cfg(feature = "objects")]
        if let Some(url) = spec.path.to_str().and_then(VolumeUrl::parse).transpose()? {
            if spec.path.as_os_str() == &*image {
                spec.name = url.name().to_owned();
            }
            spec.path = PathBuf::from(&url.address);
            spec.volume = Some(url);
        }
        #[cfg(not(feature = "objects"))]
        if let Some((scheme, _)) = spec.path.to_str().and_then(|path| path.split_once("://")) {
            if scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte)) {
                return Err(format!(
                    "'{}' is a URI, and an image is a file or a block device of this machine; volumes on object stores need a server \
                     built with --features objects",
                    spec.path.display()
                ));
            }
        }
        let mut seen = Vec::new();
        for option in parts {
            let name = option.split('=').next().unwrap_or_default().to_owned();
            if seen.contains(&name) {
                return Err(format!("the option '{name}' is there twice"));
            }
            seen.push(name);
            match option.split_once('=') {
                None if option == "readonly" => spec.read_only = true,
                Some(("offset", bytes)) => spec.offset = parse_size(bytes)?,
                Some(("size", "0")) => return Err("an export with size=0 has no bytes".into()),
                Some(("size", bytes)) => spec.size = Some(parse_size(bytes)?),
                _ => {
                    return Err(format!(
                        "'{option}' is not an option: readonly, offset=BYTES or size=BYTES; a comma of the path is \
                         written ',,'"
                    ));
                }
            }
        }
        #[cfg(feature = "objects")]
        if spec.volume.is_some() && seen.iter().any(|name| name != "readonly") {
            return Err(
                "a volume has no part: the size of a volume is given by '?size=BYTES'".into()
            );
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
    fn a_volume_has_the_name_of_its_last_part() {
        let parse = |text: &str| text.parse::<ImageSpec>();
        let spec = parse("s3://bucket/a/vol?size=1G,readonly").unwrap();
        assert_eq!((&*spec.name, spec.read_only), ("vol", true));
        assert_eq!(spec.volume.and_then(|url| url.size), Some(1 << 30));
        assert_eq!(parse("root=file:///srv/v?size=1G").unwrap().name, "root");
        for bad in ["file:///v,offset=1M", "file:///v,size=1M"] {
            assert!(parse(bad).unwrap_err().contains("no part"), "{bad}");
        }
    }

    #[test]
    fn options_follow_the_path() {
        let spec: ImageSpec = "boot=disk,,1.img,offset=1M,size=512K,readonly".parse().unwrap();
        let expected = ImageSpec {
            name: "boot".into(),
            path: "disk,1.img".into(),
            read_only: true,
            offset: 1 << 20,
            size: Some(512 << 10),
            ..ImageSpec::default()
        };
        assert_eq!(spec, expected);
        let plain: ImageSpec = "disk.img,size=5".parse().unwrap();
        assert_eq!((plain.name.as_str(), plain.size), ("disk.img", Some(5)));
        for (bad, named) in [
            ("a,b.img", "'b.img'"),
            ("a,", "''"),
            ("a,size=x", "'x'"),
            ("a,readonly=1", "readonly=1"),
        ] {
            let error = bad.parse::<ImageSpec>().unwrap_err();
            assert!(error.contains(named), "{bad}: {error}");
        }
    }
}
