//! Debian packages that are unpacked below the target folder: those of another architecture or of a newer suite.
//! The machine's own packages stay as they are.

use std::path::{Path, PathBuf};

use crate::process::{Error, Result, folder, script, write};
use crate::workspace::{Workspace, files, scratch};

/// The packages of an architecture, and of a suite: that of this machine if none is named.
pub(crate) struct Debian<'a> {
    ws: &'a Workspace,
    state: PathBuf,
    /// The folder where the packages are unpacked.
    pub(crate) files: PathBuf,
    /// A configuration of apt.
    options: PathBuf,
}

impl<'a> Debian<'a> {
    pub(crate) fn open(ws: &'a Workspace, architecture: &str, suite: Option<&str>) -> Result<Self> {
        let name = format!("{architecture}-{}", suite.unwrap_or("own"));
        let state = ws.target.join("debian").join(name);
        let files = state.join("files");
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
        Ok(Debian { ws, state, files, options })
    }

    /// Unpacks packages with all that they need to a folder, unless they have been.
    pub(crate) fn unpack(&self, into: &Path, packages: &[&str]) -> Result<()> {
        let mark = self.state.join(format!("{}.unpacked", packages.join("-")));
        if mark.exists() {
            return Ok(());
        }
        let scratch = scratch()?;
        let config = Some(self.options.clone().into());
        let apt = || self.ws.cmd("apt-get").base_env("APT_CONFIG", config.clone());
        apt().words("update -qq").run()?;
        let download = apt().words("install --download-only --yes -qq --no-install-recommends");
        let archives = format!("Dir::Cache::archives={}", scratch.path().display());
        download.args(["-o", "Debug::NoLocking=1", "-o", &archives]).args(packages).run()?;
        for file in files(scratch.path(), "deb") {
            self.ws.cmd("dpkg-deb").arg("--extract").arg(file).arg(into).run()?;
        }
        write(mark, "")
    }

    /// Writes a script that starts an unpacked program by the unpacked loader and with the unpacked libraries.
    /// `options` are its first arguments. Returns the path of the script, in a folder that a `PATH` may name.
    pub(crate) fn command(&self, program: &str, options: &str) -> Result<PathBuf> {
        let (files, path) = (self.files.display(), self.state.join("bin").join(program));
        let libraries = format!("{files}/usr/lib/x86_64-linux-gnu");
        let loader = format!("{libraries}/ld-linux-x86-64.so.2");
        let started =
            format!("{loader} --argv0 {program} --library-path {libraries}:{libraries}/ceph");
        script(&path, &format!("exec {started} {files}/usr/bin/{program} {options} \"$@\""))?;
        Ok(path)
    }
}
