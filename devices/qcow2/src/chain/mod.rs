//! An image with what it stands on, and where each byte of the disk is.
//!
//! [`Chain::find`] and [`Chain::plan`] are for sidecores: they look at memory only, take no lock
//! for longer than a list operation, and say when somebody else has to go a longer way. That way is
//! in [`read`], [`write`] and [`clear`]: plain calls that wait for the disk.

pub mod clear;
pub mod plan;
pub mod read;
pub mod resize;
pub mod write;

use std::sync::Arc;

use crate::format::entry::{self, Kind};
use crate::map::claims::Waker;
use crate::map::epochs::Party;
use crate::map::image::Image;
use crate::map::view::{Look, Piece, View};
use crate::store::Store;

/// Layer of a chain: one image.
#[derive(Debug)]
pub enum Layer {
    /// A qcow2 image, which has a map.
    Qcow2(Box<Image>),
    /// A raw image; behind its end there are zeroes.
    Raw {
        /// The file.
        store: Arc<dyn Store>,
        /// Length of the file.
        len_bytes: u64,
    },
}

impl Layer {
    fn len_bytes(&self) -> u64 {
        match self {
            Self::Qcow2(image) => image.len_bytes(),
            Self::Raw { len_bytes, .. } => *len_bytes,
        }
    }

    /// File with the layer's data.
    pub(crate) fn data(&self) -> &dyn Store {
        match self {
            Self::Qcow2(image) => &*image.data,
            Self::Raw { store, .. } => &**store,
        }
    }
}

/// An image, its backing file, that one's backing file, and so on.
#[derive(Debug)]
pub struct Chain {
    top: Box<Image>,
    below: Vec<Layer>,
}

/// Place of some bytes of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Zeroes; their number.
    Zero(u64),
    /// Bytes in a file.
    File {
        /// Index of the layer.
        layer: usize,
        /// Offset in the layer's data file.
        host: u64,
        /// Number of bytes.
        len: u64,
    },
    /// Bytes in a compressed cluster of a layer.
    Compressed {
        /// Index of the layer.
        layer: usize,
        /// Number of bytes.
        len: u64,
    },
    /// The slice of a layer is not in memory.
    Miss {
        /// Index of the layer.
        layer: usize,
    },
    /// A layer contradicts itself there.
    Bad {
        /// Index of the layer.
        layer: usize,
    },
}

/// View of a chain, for one queue or one helper.
pub struct ChainView {
    views: Vec<Option<View>>,
    pub(crate) party: Arc<Party>,
    pub(crate) waker: Waker,
}

impl Chain {
    /// `below`: backing file first.
    pub fn new(top: Image, below: Vec<Layer>) -> Self {
        Self { top: Box::new(top), below }
    }

    /// The image itself.
    #[inline]
    pub fn top(&self) -> &Image {
        &self.top
    }

    fn layers(&self) -> usize {
        1 + self.below.len()
    }

    fn layer_image(&self, layer: usize) -> Option<&Image> {
        match layer.checked_sub(1) {
            None => Some(&self.top),
            Some(n) => match self.below.get(n)? {
                Layer::Qcow2(image) => Some(image),
                Layer::Raw { .. } => None,
            },
        }
    }

    fn layer_len(&self, layer: usize) -> u64 {
        match layer.checked_sub(1) {
            None => self.top.len_bytes(),
            Some(n) => self.below.get(n).map_or(0, Layer::len_bytes),
        }
    }

    fn layer_data(&self, layer: usize) -> &dyn Store {
        match layer.checked_sub(1).and_then(|n| self.below.get(n)) {
            None => &*self.top.data,
            Some(layer) => layer.data(),
        }
    }

    /// A way to look at it. `waker` rings when a claim is free that [`Chain::plan`] found taken.
    pub fn view(&self, waker: Waker) -> ChainView {
        let party = match &self.top.writer {
            Some(writer) => writer.epochs.join(),
            None => Arc::default(),
        };
        let views =
            (0..self.layers()).map(|layer| self.layer_image(layer).map(View::new)).collect();
        ChainView { views, party, waker }
    }

    /// Finds the bytes from `offset` on, at most `max` of them (not 0). No I/O.
    #[inline]
    pub fn find(&self, view: &mut ChainView, offset: u64, max: u64) -> Place {
        if let Some(top) = view.top()
            && offset + max <= self.top.len_bytes()
            && let Some((entry, _)) = top.data_entry(&self.top, offset, max)
        {
            let host = entry::offset(entry) + self.top.geometry().in_cluster(offset);
            return Place::File { layer: 0, host, len: max };
        }
        self.find_from(0, view, offset, max)
    }

    /// Address in memory of the image's own entry of a byte of the disk, if it is there: for
    /// callers that want it in the cache before they look.
    #[inline]
    pub fn entry_address(&self, view: &mut ChainView, offset: u64) -> Option<*const u8> {
        view.top()?.entry_address(&self.top, offset)
    }

    /// Finds bytes without the layers above `layer`, see [`Chain::find`].
    pub(crate) fn find_from(
        &self,
        layer: usize,
        view: &mut ChainView,
        offset: u64,
        max: u64,
    ) -> Place {
        let mut max = max;
        for layer in layer..self.layers() {
            let len = self.layer_len(layer);
            if offset >= len {
                return Place::Zero(max);
            }
            max = max.min(len - offset);
            let Some(image) = self.layer_image(layer) else {
                return Place::File { layer, host: offset, len: max };
            };
            let Some(view) = view.views[layer].as_mut() else { return Place::Miss { layer } };
            let Look::Piece(piece) = view.look(image, offset, max) else {
                return Place::Miss { layer };
            };
            let Piece { kind, host, len, .. } = piece;
            match kind {
                Kind::Unallocated => max = len,
                Kind::Zero => return Place::Zero(len),
                Kind::Data => return Place::File { layer, host, len },
                Kind::Compressed => return Place::Compressed { layer, len },
                Kind::Bad => return Place::Bad { layer },
            }
        }
        Place::Zero(max)
    }
}

impl ChainView {
    #[inline]
    pub(crate) fn top(&mut self) -> Option<&mut View> {
        self.views.first_mut()?.as_mut()
    }
}

impl std::fmt::Debug for ChainView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChainView").field("layers", &self.views.len()).finish_non_exhaustive()
    }
}
