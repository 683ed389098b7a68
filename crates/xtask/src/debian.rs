//! Debian packages that are unpacked below the target folder: those of another architecture or of a newer suite.
//! The machine's own packages stay as they are.

use std::cell::Cell;
use std::path::{Path, PathBuf};

use crate::process::{Cmd, Error, Result, folder, read, write};
use crate::workspace::{Workspace, files, scratch};

/// The packages of an architecture, and of a suite: that of this machine if none is named.
pub(crate) struct Debian<'a> {
    ws: &'a Workspace,
    state: PathBuf,
    /// The folder where the packages are unpacked.
    pub(crate) files: PathBuf,
    /// A configuration of apt.
    options: PathBuf,
    is_updated: Cell<bool>,
}

impl<'a> Debian<'a> {
    /// Returns the folder where the packages are unpacked.
    pub(crate) fn files(ws: &Workspace, architecture: &str, suite: Option<&str>) -> PathBuf {
        let name = format!("{architecture}-{}", suite.unwrap_or("own"));
        ws.target.join("debian").join(name).join("files")
    }

    pub(crate) fn open(ws: &'a Workspace, architecture: &str, suite: Option<&str>) -> Result<Self> {
        let files = Debian::files(ws, architecture, suite);
        let state = files.parent().unwrap_or(&files).to_path_buf();
        folder(state.join("lists/partial"))?;
        folder(state.join("cache/archives/partial"))?;
        let mut settings = format!(
            "APT::Architecture \"{architecture}\";\nAPT::Architectures \"{architecture}\";\n\
             Dir::State::lists \"{0}/lists\";\nDir::State::status \"/dev/null\";\nDir::Cache \"{0}/cache\";\n\
             Acquire::Languages \"none\";\nAcquire::IndexTargets::deb::DEP-11::DefaultEnabled \"false\";\n\
             APT::Sandbox::User \"\";\n",
            state.display()
        );
        if let Some(suite) = suite {
            // The mirror that apt is configured for.
            let targets =
                ["indextargets", "--format", "$(LABEL) $(REPO_URI)", "Created-By: Packages"];
            let listed = ws.cmd("apt-get").args(targets).output()?;
            let mirror = listed.lines().find_map(|line| line.strip_prefix("Debian "));
            let mirror = mirror.ok_or_else(|| Error::new("apt has no Debian mirror"))?;
            let list = state.join("sources.list");
            let keys = "signed-by=/usr/share/keyrings/debian-archive-keyring.gpg";
            write(&list, format!("deb [{keys}] {mirror} {suite} main\n"))?;
            settings += &format!(
                "Dir::Etc::sourcelist \"{}\";\nDir::Etc::sourceparts \"-\";\n",
                list.display()
            );
        }
        let options = state.join("apt.conf");
        write(&options, settings)?;
        Ok(Debian { ws, state, files, options, is_updated: Cell::new(false) })
    }

    /// An apt command, after the lists have been downloaded.
    fn apt(&self, command: &str) -> Result<Cmd> {
        if !self.is_updated.replace(true) {
            self.ws.cmd("apt-get").env("APT_CONFIG", &self.options).words("update -qq").run()?;
        }
        Ok(self.ws.cmd(command).env("APT_CONFIG", &self.options))
    }

    /// Returns the package that `package` depends on and whose name begins with `prefix`.
    pub(crate) fn dependency(&self, package: &str, prefix: &str) -> Result<String> {
        let known = self.state.join(format!("{package}.{prefix}"));
        if let Ok(name) = read(&known) {
            return Ok(name);
        }
        let all = self.apt("apt-cache")?.words("depends").arg(package).output()?;
        let mut names = all.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
        let name = names.find(|name| name.starts_with(prefix));
        let name = name.ok_or_else(|| Error::new(format!("{package} depends on no {prefix}*")))?;
        write(known, name)?;
        Ok(name.to_string())
    }

    /// Unpacks packages, unless they have been.
    pub(crate) fn unpack(&self, packages: &[&str]) -> Result<()> {
        packages.iter().try_for_each(|package| self.unpack_into(&self.files, package))
    }

    pub(crate) fn unpack_into(&self, into: &Path, package: &str) -> Result<()> {
        let mark = self.state.join(format!("{package}.unpacked"));
        if mark.exists() {
            return Ok(());
        }
        let scratch = scratch()?;
        let download = self.apt("apt-get")?.words("download -qq").arg(package);
        download.dir(scratch.path()).run()?;
        for file in files(scratch.path(), "deb") {
            self.ws.cmd("dpkg-deb").arg("--extract").arg(file).arg(into).run()?;
        }
        write(mark, "")
    }
}
