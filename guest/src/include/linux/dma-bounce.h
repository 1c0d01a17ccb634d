/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Bouncing of small DMA through memory that stays mapped in the IOMMU: interface for device
 * drivers and IOMMU drivers.
 */
#ifndef _LINUX_DMA_BOUNCE_H
#define _LINUX_DMA_BOUNCE_H

#include <linux/sizes.h>
#include <linux/types.h>

struct blk_dma_iter;
struct device;
struct dma_bounce_pool;
struct dma_iova_state;
struct iommu_domain;
struct request;

/* Minimum size in bytes of a chunk that a provider adds */
#define DMA_BOUNCE_MIN_CHUNK	SZ_256K

/**
 * struct dma_bounce_thresholds - maximum sizes in bytes of mappings that bounce
 * @read:	maximum if the device reads the memory
 * @write:	maximum if the device writes the memory
 *
 * The smaller maximum applies if the device may do both.
 */
struct dma_bounce_thresholds {
	u32	read;
	u32	write;
};

/**
 * struct dma_bounce_device - bounce state of one device behind an IOMMU
 * @pool:	pool of the device's DMA domain, or NULL
 * @threshold:	thresholds of the device. 0 means the domain's threshold.
 * @opt_in:	the device's driver has called dma_bounce_opt_in()
 * @choice:	mode that sysfs sets: enum dma_bounce_switch
 * @files:	the device has files in sysfs
 * @untrusted:	the platform marks the device as untrusted. This does not change.
 */
struct dma_bounce_device {
	struct dma_bounce_pool		*pool;
	struct dma_bounce_thresholds	threshold;
	bool				opt_in;
	u8				choice;
	bool				files;
	bool				untrusted;
};

/**
 * struct dma_bounce_limits - limits that a provider of bounce memory sets for a domain
 * @iova:	first IOVA of the range in which chunks are mapped, a multiple of @chunk_size
 * @len:	length of the range in bytes, a multiple of @chunk_size
 * @chunk_size:	distance of chunks in bytes, a power of two of at least DMA_BOUNCE_MIN_CHUNK
 * @budget:	maximum number of bytes of all chunks of the domain
 * @threshold:	maximum sizes of mappings that are worth bouncing. If @threshold.read is 0, the
 *		provider does not know it. If @threshold.write is 0, it is @threshold.read.
 * @source:	identifies the memory budget that the domain draws on. Domains with the same @source
 *		share one budget. NULL for a domain that shares with no other domain.
 * @surplus:	number of chunks that the provider wants back from all domains of @source together
 */
struct dma_bounce_limits {
	dma_addr_t			iova;
	u64				len;
	size_t				chunk_size;
	u64				budget;
	struct dma_bounce_thresholds	threshold;
	const void			*source;
	unsigned int			surplus;
};

/* Owner of the pages that a provider makes for its memory */
#define DMA_BOUNCE_LEND_OWNER	((void *)&dma_bounce_lend_owner)

/**
 * struct dma_bounce_region - memory region that contains all chunks of a provider
 * @phys:	CPU physical address of the region
 * @va:		kernel virtual address of the region
 * @len:	length in bytes, 0 as long as the region has no pages
 */
struct dma_bounce_region {
	phys_addr_t	phys;
	void		*va;
	u64		len;
};

/**
 * struct dma_bounce_ops - a provider of memory that stays mapped in the IOMMU
 * @name:	name of the provider for statistics and messages
 * @limits:	Fills in the limits of a domain. They can change, except iova, len and chunk_size.
 *		Returns 0, or a negative error if the provider does not serve this domain.
 * @add:	Maps a chunk of zeroed memory at the given IOVA. On entry, the size is the chunk
 *		size. @add may lower it to a smaller power of two of at least DMA_BOUNCE_MIN_CHUNK.
 *		The protection is IOMMU_READ, IOMMU_WRITE or both. Returns the CPU's address of the
 *		chunk, or an error pointer. The error is -ENOMEM if there is no memory left.
 * @del:	Unmaps a chunk that @add mapped, and gives its memory back. Neither the CPU nor a
 *		device uses the chunk any more. Must not fail for lack of memory, because the pool
 *		calls it to free memory. Returns false if the IOMMU refuses, so that devices may
 *		still reach the chunk. Then the chunk is kept, and the caller may retry.
 * @lend:	Makes pages for the provider's memory, if it has none yet, so that applications can
 *		use it, and fills in the memory's region. Returns 0 or a negative error. NULL if the
 *		provider cannot lend memory.
 * @held:	Returns true if something holds pages of a chunk that @add returned, because the
 *		memory was lent before. The chunk is not used as long as this is so. NULL if the
 *		provider cannot lend memory.
 *
 * All operations may sleep. Calls of @add and @del for one domain are serialised.
 */
struct dma_bounce_ops {
	const char *name;
	int (*limits)(struct iommu_domain *domain, struct dma_bounce_limits *limits);
	void *(*add)(struct iommu_domain *domain, dma_addr_t iova, size_t *size, int prot);
	bool (*del)(struct iommu_domain *domain, dma_addr_t iova, void *va, size_t size);
	int (*lend)(struct iommu_domain *domain, struct dma_bounce_region *region);
	bool (*held)(struct iommu_domain *domain, void *va, size_t size);
};

extern const u8 dma_bounce_lend_owner;

#ifdef CONFIG_IOMMU_DMA_BOUNCE

void dma_bounce_opt_in(struct device *dev);
bool dma_bounce_need_sync(struct device *dev, dma_addr_t addr);
bool dma_bounce_allowed(void);
void dma_bounce_stop(struct iommu_domain *domain);
void dma_bounce_start(struct iommu_domain *domain);
void dma_bounce_limits_changed(const struct dma_bounce_ops *ops);

#else /* !CONFIG_IOMMU_DMA_BOUNCE */

static inline void dma_bounce_opt_in(struct device *dev)
{
}

static inline bool dma_bounce_need_sync(struct device *dev, dma_addr_t addr)
{
	return true;
}

static inline bool dma_bounce_allowed(void)
{
	return false;
}

static inline void dma_bounce_stop(struct iommu_domain *domain)
{
}

static inline void dma_bounce_start(struct iommu_domain *domain)
{
}

static inline void dma_bounce_limits_changed(const struct dma_bounce_ops *ops)
{
}

#endif /* CONFIG_IOMMU_DMA_BOUNCE */

#ifdef CONFIG_IOMMU_DMA_BOUNCE_REQUEST

bool dma_bounce_map_request(struct request *req, struct device *dma_dev,
			    struct dma_iova_state *state, struct blk_dma_iter *iter,
			    unsigned long attrs);
void dma_bounce_unmap_request(struct request *req, struct device *dma_dev,
			      struct dma_iova_state *state, unsigned long attrs);
bool dma_bounce_request_by_piece(struct request *req, struct device *dma_dev);

#else /* !CONFIG_IOMMU_DMA_BOUNCE_REQUEST */

static inline bool dma_bounce_map_request(struct request *req, struct device *dma_dev,
					  struct dma_iova_state *state, struct blk_dma_iter *iter,
					  unsigned long attrs)
{
	return false;
}

static inline void dma_bounce_unmap_request(struct request *req, struct device *dma_dev,
					    struct dma_iova_state *state, unsigned long attrs)
{
}

static inline bool dma_bounce_request_by_piece(struct request *req, struct device *dma_dev)
{
	return false;
}

#endif /* CONFIG_IOMMU_DMA_BOUNCE_REQUEST */
#endif /* _LINUX_DMA_BOUNCE_H */
