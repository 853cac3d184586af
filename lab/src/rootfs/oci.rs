//! Descriptions of container images: the layout of OCI, and the form of `docker save`.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::archive::Archive;

/// Maximum depth of indices of an image.
const DEEPEST: u32 = 4;
/// Maximum number of layers.
const MOST_LAYERS: usize = 512;

/// An image: the names of its layers in the archive, the lowest first, and the environment of its programs.
#[derive(Debug)]
pub(super) struct Image {
    pub layers: Vec<String>,
    pub environment: Vec<(String, String)>,
}

impl Image {
    /// Finds the only image of an archive.
    ///
    /// # Errors
    /// There is no image, or there are several, or it is for other processors.
    pub(super) fn of(archive: &Archive) -> Result<Self> {
        let (config, layers) = if archive.find("index.json")?.is_some() {
            let manifest = manifest_of(archive)?;
            let layers = manifest.layers.iter().map(|layer| layer.digest.path()).collect::<Result<_>>()?;
            (manifest.config.digest.path()?, layers)
        } else if archive.find("manifest.json")?.is_some() {
            let saved: Vec<Saved> = archive.json("manifest.json")?;
            let count = saved.len();
            let Ok([image]) = <[Saved; 1]>::try_from(saved) else { bail!("it has {count} images: save a single one") };
            (image.config, image.layers)
        } else {
            bail!("it has neither 'index.json' (OCI) nor 'manifest.json' (docker save): this is no archive of an image")
        };
        if layers.len() > MOST_LAYERS {
            bail!("the image has more than {MOST_LAYERS} layers");
        }
        let config: ImageConfig = archive.json(&config)?;
        if config.architecture != "amd64" || config.os != "linux" {
            bail!("the image is for {} on {}; the guests are linux on amd64", config.os, config.architecture);
        }
        let environment = config.config.unwrap_or_default().env.unwrap_or_default();
        let environment = environment.iter().filter_map(|text| text.split_once('='));
        let environment = environment.filter(|(name, _)| is_name(name));
        Ok(Self { layers, environment: environment.map(|(name, value)| (name.to_owned(), value.to_owned())).collect() })
    }
}

/// Returns `true` for the name of a variable.
fn is_name(name: &str) -> bool {
    let plain = |c: char| c == '_' || c.is_ascii_alphanumeric();
    !name.is_empty() && !name.starts_with(|c: char| c.is_ascii_digit()) && name.chars().all(plain)
}

/// Returns the manifest of an OCI layout, through its indices.
fn manifest_of(archive: &Archive) -> Result<Manifest> {
    let mut name = "index.json".to_owned();
    for _ in 0..DEEPEST {
        let index: Index = archive.json(&name)?;
        let Some(manifests) = index.manifests else { return archive.json(&name) };
        let fits = |entry: &Descriptor| match &entry.platform {
            Some(platform) => platform.architecture == "amd64" && platform.os == "linux",
            None => true,
        };
        let found: Vec<_> = manifests.iter().filter(|entry| fits(entry)).collect();
        let [entry] = found.as_slice() else {
            bail!("'{name}' has {} images for linux on amd64: save a single one", found.len());
        };
        name = entry.digest.path()?;
    }
    archive.json(&name).context("the image is in too many indices")
}

/// Digest of a file, by which it is found: `sha256:` and hexadecimal digits.
#[derive(Clone, Debug, Deserialize)]
struct Digest(String);

impl Digest {
    /// Returns the path of the file.
    fn path(&self) -> Result<String> {
        let plain = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric());
        match self.0.split_once(':') {
            Some((algorithm, digits)) if plain(algorithm) && plain(digits) => Ok(format!("blobs/{algorithm}/{digits}")),
            _ => bail!("'{}' is no digest", self.0.escape_debug()),
        }
    }
}

#[derive(Debug, Deserialize)]
struct Index {
    manifests: Option<Vec<Descriptor>>,
}

#[derive(Debug, Deserialize)]
struct Descriptor {
    digest: Digest,
    platform: Option<Platform>,
}

#[derive(Debug, Deserialize)]
struct Platform {
    architecture: String,
    os: String,
}

#[derive(Debug, Deserialize)]
struct Manifest {
    config: Descriptor,
    layers: Vec<Descriptor>,
}

/// An image in the form of `docker save`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Saved {
    config: String,
    layers: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct ImageConfig {
    architecture: String,
    os: String,
    config: Option<Settings>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Settings {
    env: Option<Vec<String>>,
    #[serde(flatten)]
    _others: BTreeMap<String, serde::de::IgnoredAny>,
}
