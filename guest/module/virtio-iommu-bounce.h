/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * A driver of virtio-iommu outside the IOMMU subsystem, for kernels without the patch: DMA of the
 * endpoints' drivers bounces through windows, or is mapped. See docs/stock-kernels.md.
 */
#ifndef VIRTIO_IOMMU_BOUNCE_H
#define VIRTIO_IOMMU_BOUNCE_H

#include <linux/debugfs.h>
#include <linux/dma-map-ops.h>
#include <linux/iommu.h>
#include <linux/iova.h>
#include <linux/pci.h>
#include <linux/scatterlist.h>
#include <linux/spinlock.h>
#include <linux/virtio.h>

#include "virtio_iommu_window.h"

/* Slots have 4 KiB to 128 KiB: a class for each power of two */
#define VIB_MIN_SHIFT	12
#define VIB_CLASSES	6
#define VIB_MAX_SLOT	(1UL << (VIB_MIN_SHIFT + VIB_CLASSES - 1))

/* Smallest chunk that is any use, and largest */
#define VIB_MIN_CHUNK	SZ_256K
#define VIB_MAX_CHUNK	SZ_1G

/**
 * struct vib_device - the virtio-iommu
 * @vdev: the device
 * @iommu: what the IOMMU subsystem is told, see waiting.c
 * @lock: serialises requests; taken with interrupts off, inside all other locks
 * @vq: the request queue, NULL once the device is gone
 * @buffer: request and reply, of which there is one at a time
 * @buffer_len: its size in bytes
 * @region: where chunks appear
 * @region_len: its size in bytes
 * @shown: the places of @region that hold a chunk of ours, by chunk; under @lock
 * @iova_start: first IOVA of windows
 * @iova_len: bytes from there
 * @chunk_size: bytes of a chunk, a power of two
 * @input_end: last IOVA that can be translated
 * @first_domain: first number for a domain
 * @last_domain: last one
 * @probe_size: bytes of properties that PROBE answers, 0 without PROBE
 * @advised: the size in bytes up to which the host advises to copy, 0 if it does not know
 */
struct vib_device {
	struct virtio_device	*vdev;
	struct iommu_device	iommu;
	spinlock_t		lock; /* of vq, buffer and shown */
	struct virtqueue	*vq;
	void			*buffer;
	size_t			buffer_len;
	void			*region;
	u64			region_len;
	unsigned long		*shown;
	u64			iova_start;
	u64			iova_len;
	u64			chunk_size;
	u64			input_end;
	u32			first_domain;
	u32			last_domain;
	u32			probe_size;
	u32			advised;
};

/**
 * struct vib_slot - one bounce buffer
 * @next: the next free one of its class
 * @va: its memory
 * @iova: its address for the device
 * @orig: the buffer, if that is in one piece
 * @sgl: the buffer, if that is a list
 * @nents: entries of @sgl
 * @skip: bytes before the data, so that the data is as far into a page as in the buffer
 * @size: bytes of data, 0 while the slot is free
 */
struct vib_slot {
	struct vib_slot		*next;
	void			*va;
	dma_addr_t		iova;
	void			*orig;
	struct scatterlist	*sgl;
	u32			nents;
	u32			skip;
	u32			size;
};

/* A chunk, cut into slots of one class */
struct vib_chunk {
	u64			offset;
	unsigned int		class;
	struct vib_slot		slots[];
};

/* The free slots of one size; no chunk is asked for before @retry when the last one was refused. */
struct vib_class {
	spinlock_t		lock; /* of free and retry */
	struct vib_slot		*free;
	unsigned long		retry;
};

/**
 * struct vib_endpoint - a PCI device behind the virtio-iommu, alone in its domain
 * @ops: its DMA operations, by which it is found
 * @device: the virtio-iommu
 * @pci: the device
 * @next: in the list of endpoints
 * @debugfs: its directory
 * @domain: number of its domain
 * @threshold: bytes up to which its DMA bounces
 * @iovad: IOVAs of what is mapped
 * @classes: free slots by size
 * @chunks: chunks by place in the windows; none goes before the endpoint
 * @places: how many there are
 * @nchunks: how many are backed
 * @bounced: buffers and lists that bounced
 * @mapped: those that were mapped
 * @no_slot: those of them that were small enough to bounce
 */
struct vib_endpoint {
	struct dma_map_ops	ops;
	struct vib_device	*device;
	struct pci_dev		*pci;
	struct list_head	next;
	struct dentry		*debugfs;
	u32			domain;
	size_t			threshold;
	struct iova_domain	iovad;
	struct vib_class	classes[VIB_CLASSES];
	struct vib_chunk	**chunks;
	unsigned int		places;
	atomic_t		nchunks;
	atomic64_t		bounced;
	atomic64_t		mapped;
	atomic64_t		no_slot;
};

static inline struct vib_endpoint *vib_endpoint(struct device *dev)
{
	return container_of(get_dma_ops(dev), struct vib_endpoint, ops);
}

static inline bool vib_is_window(struct vib_endpoint *endpoint, dma_addr_t addr)
{
	return addr - endpoint->device->iova_start < endpoint->device->iova_len;
}

static inline bool vib_reads(enum dma_data_direction dir)
{
	return dir == DMA_TO_DEVICE || dir == DMA_BIDIRECTIONAL;
}

static inline bool vib_writes(enum dma_data_direction dir)
{
	return dir == DMA_FROM_DEVICE || dir == DMA_BIDIRECTIONAL;
}

/* dma-ops.c */
extern const struct dma_map_ops vib_dma_ops;

/* endpoint.c */
extern struct notifier_block vib_pci_notifier;
void vib_endpoints_begin(struct vib_device *device);
void vib_endpoints_end(void);

/* mapping.c */
dma_addr_t vib_map(struct vib_endpoint *endpoint, phys_addr_t phys, size_t size,
		   enum dma_data_direction dir);
void vib_unmap(struct vib_endpoint *endpoint, dma_addr_t addr, size_t size);
int vib_map_list(struct vib_endpoint *endpoint, struct scatterlist *sgl, int nents,
		 enum dma_data_direction dir);
void vib_unmap_list(struct vib_endpoint *endpoint, struct scatterlist *sgl, int nents);

/* request.c */
int vib_request(struct vib_device *device, void *request, size_t readable, size_t size);
/* Sends a request whose writable part begins with @member. */
#define vib_send(device, request, member) ({						\
	typeof(request) __request = (request);						\
	vib_request(device, __request, offsetof(typeof(*__request), member),		\
		    sizeof(*__request));						\
})
int vib_window_add(struct vib_device *device, u32 domain, u64 iova, u64 *offset);
void vib_window_ended(struct vib_device *device, u64 offset);

/* waiting.c */
int vib_stop_waiting(struct vib_device *device);

/* slots.c */
int vib_slots_init(struct vib_endpoint *endpoint);
void vib_slots_free(struct vib_endpoint *endpoint);
struct vib_slot *vib_slot_take(struct vib_endpoint *endpoint, size_t skip, size_t size);
struct vib_slot *vib_slot_find(struct vib_endpoint *endpoint, dma_addr_t addr);
void vib_slot_give(struct vib_endpoint *endpoint, struct vib_slot *slot);
void vib_copy(struct vib_slot *slot, size_t offset, size_t len, bool in);

#endif
