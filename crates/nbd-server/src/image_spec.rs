//! One `--image` of the command line: `[NAME=]PATH[,readonly]`.

use std::path::PathBuf;
use std::str::FromStr;

use crate::values::uri;
#[cfg(feature = "objects")]
use crate::volume::{CREDENTIALS, VolumeUrl};

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
        // No argument of a command has a NUL.
        let text_of_parts = text.replace(",,", "\0");
        let mut parts = text_of_parts.split(',').map(|part| part.replace('\0', ","));
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
        let scheme = spec.path.to_str().and_then(uri).map(|(scheme, _)| scheme);
        #[cfg(feature = "objects")]
        if scheme.is_some_and(|scheme| scheme != "file")
            && text.split_once("://").is_some_and(|(_, rest)| rest.contains('@'))
        {
            return Err(CREDENTIALS.into()); // also if a comma of the secret has split the address
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
        if let Some(scheme) = scheme {
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

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(parse("a@b=s3://bucket/v").unwrap().name, "a@b");
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
