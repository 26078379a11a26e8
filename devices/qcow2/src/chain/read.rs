//! Reading the longer way: slices are read, compressed clusters are expanded.

use std::io;

use super::{Chain, ChainView, Place};
use crate::error::{contradiction, is_contradiction, unreadable};
use crate::format::{compressed, entry};

/// Memory of a helper between requests: the cluster that it expanded last.
#[derive(Debug, Default)]
pub struct Scratch {
    cluster: Vec<u8>,
    /// Layer and entry of that cluster. An entry of a compressed cluster never comes back for
    /// another.
    of: Option<(usize, u64)>,
}

impl Chain {
    /// Fills `buf` from `offset`. Waits for the disk.
    pub fn read(
        &self,
        view: &mut ChainView,
        scratch: &mut Scratch,
        buf: &mut [u8],
        offset: u64,
    ) -> io::Result<()> {
        self.read_from(0, view, scratch, buf, offset)
    }

    /// Reads without the layers above `layer`, see [`Chain::read`].
    pub(crate) fn read_from(
        &self,
        layer: usize,
        view: &mut ChainView,
        scratch: &mut Scratch,
        buf: &mut [u8],
        offset: u64,
    ) -> io::Result<()> {
        let mut at = 0;
        while at < buf.len() {
            let (here, left) = (offset + at as u64, (buf.len() - at) as u64);
            let place = self.find_from(layer, view, here, left);
            at += self.read_piece(place, view, scratch, &mut buf[at..], here)?;
        }
        Ok(())
    }

    /// Reads what `place` says of `offset`: the bytes read, 0 after a miss, which is none any more.
    fn read_piece(
        &self,
        place: Place,
        view: &mut ChainView,
        scratch: &mut Scratch,
        buf: &mut [u8],
        offset: u64,
    ) -> io::Result<usize> {
        match place {
            Place::Zero(len) => {
                buf[..len as usize].fill(0);
                Ok(len as usize)
            }
            Place::File { layer, host, len } => {
                self.layer_data(layer).read_padded(&mut buf[..len as usize], host)?;
                Ok(len as usize)
            }
            Place::Compressed { layer, len } => {
                self.expand(layer, scratch, &mut buf[..len as usize], offset)
            }
            Place::Miss { layer } => {
                self.load(layer, view, offset)?;
                Ok(0)
            }
            Place::Bad { layer } => {
                let image = self.layer_image(layer).map_or("", |image| image.name());
                let text = format!("the entry of byte {offset} of the disk, in {image}");
                self.top.noticed(of_layer(layer, Err(contradiction(text))))
            }
        }
    }

    /// Reads the slice of a layer that maps `offset`.
    pub(crate) fn load(&self, layer: usize, view: &mut ChainView, offset: u64) -> io::Result<()> {
        let Some(image) = self.layer_image(layer) else { return Ok(()) };
        let number = image.geometry().slice_of(image.geometry().cluster_of(offset));
        let slice = of_layer(layer, image.noticed(image.slice(number)))?;
        if let (Some(view), Some(slice)) = (view.views[layer].as_mut(), slice) {
            view.remember(slice);
        }
        Ok(())
    }

    /// Copies from a compressed cluster, up to its end.
    fn expand(
        &self,
        layer: usize,
        scratch: &mut Scratch,
        buf: &mut [u8],
        offset: u64,
    ) -> io::Result<usize> {
        let Some(image) = self.layer_image(layer) else { return Ok(0) };
        let geometry = image.geometry();
        let (raw, _) = of_layer(layer, image.entry(geometry.cluster_of(offset)))?;
        if raw & entry::COMPRESSED == 0 {
            // It was written meanwhile: look again.
            return Ok(0);
        }
        if scratch.of != Some((layer, raw)) {
            scratch.of = None;
            let (from, len) = entry::compressed(raw, geometry);
            let mut stored = vec![0; len as usize];
            image.data.read_padded(&mut stored, from)?;
            scratch.cluster.resize(geometry.cluster_len() as usize, 0);
            compressed::expand(geometry.compression, &stored, &mut scratch.cluster)?;
            scratch.of = Some((layer, raw));
        }
        let from = geometry.in_cluster(offset) as usize;
        let n = buf.len().min(scratch.cluster.len() - from);
        buf[..n].copy_from_slice(&scratch.cluster[from..from + n]);
        Ok(n)
    }
}

/// Maps errors of a layer: a contradiction in a backing file fails requests, but is none of the
/// image above, which goes on, and is not marked.
fn of_layer<T>(layer: usize, result: io::Result<T>) -> io::Result<T> {
    result
        .map_err(|e| if layer > 0 && is_contradiction(&e) { unreadable(e.to_string()) } else { e })
}
