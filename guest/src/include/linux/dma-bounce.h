/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Bouncing of small DMA through memory that stays mapped in the IOMMU: what device drivers and
 * IOMMU drivers see of it.
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

/* Bytes of the smallest chunk that a provider may add */
#define DMA_BOUNCE_MIN_CHUNK	SZ_256K

/**
 * struct dma_bounce_device - what is known of one device behind an IOMMU
 * @pool:	of its DMA domain, or NULL
 * @threshold:	size in bytes up to which its mappings are bounced, 0 for the domain's
 * @opt_in:	its driver has called dma_bounce_opt_in()
 * @choice:	what sysfs says: enum dma_bounce_switch
 * @files:	it has files in sysfs
 * @untrusted:	its bus does not trust it; that does not change
 */
struct dma_bounce_device {
	struct dma_bounce_pool	*pool;
	u32			threshold;
	bool			opt_in;
	u8			choice;
	bool			files;
	bool			untrusted;
};

/**
 * struct dma_bounce_limits - what a provider of bounce memory allows a domain
 * @iova:	first IOVA of the range in which chunks are mapped, a multiple of @chunk_size
 * @len:	length of that range in bytes, a multiple of @chunk_size
 * @chunk_size:	bytes from one chunk to the next, a power of two of at least DMA_BOUNCE_MIN_CHUNK
 * @budget:	most bytes of memory that the domain's chunks may have together
 * @threshold:	size in bytes up to which bouncing is worthwhile; 0 if the provider cannot tell
 * @source:	what the memory comes out of: domains that have the same share one amount; NULL for
 *		a domain that shares with none
 * @surplus:	number of chunks that the provider wants back, from all domains of @source together
 */
struct dma_bounce_limits {
	dma_addr_t	iova;
	u64		len;
	size_t		chunk_size;
	u64		budget;
	size_t		threshold;
	const void	*source;
	unsigned int	surplus;
};

/* The owner of pages that a provider makes of its memory */
#define DMA_BOUNCE_LEND_OWNER	((void *)&dma_bounce_lend_owner)

/**
 * struct dma_bounce_region - where the memory of all chunks of a provider is
 * @phys:	its start for the CPU
 * @va:		where it is mapped
 * @len:	its bytes; 0 as long as it has no pages
 */
struct dma_bounce_region {
	phys_addr_t	phys;
	void		*va;
	u64		len;
};

/**
 * struct dma_bounce_ops - a provider of memory that stays mapped in the IOMMU
 * @name:	for statistics and messages
 * @limits:	Tells the limits of a domain. They can change, except iova, len and chunk_size.
 *		Returns 0, or a negative error if the provider does not serve this domain.
 * @add:	Maps a chunk of zeroed memory at the given IOVA. Its size is the chunk size, and
 *		may be set to a lower power of two down to DMA_BOUNCE_MIN_CHUNK. The protection is
 *		IOMMU_READ, IOMMU_WRITE or both. Returns where the CPU sees the chunk, or an error
 *		pointer, which is -ENOMEM if there is no memory left.
 * @del:	Unmaps what @add mapped and gives its memory back. Neither the CPU nor a device
 *		uses it any more. Does not fail for want of memory, as it is called to free some.
 *		Returns false if devices may still reach it, because the IOMMU refuses: then it is
 *		kept, and it may be tried again.
 * @lend:	Makes pages of the provider's memory, if it has none yet, so that applications may
 *		have some of it, and tells where it is. Returns 0 or a negative error. NULL if
 *		that cannot be done.
 *
 * All may sleep. Calls of @add and @del for one domain are serialised.
 */
struct dma_bounce_ops {
	const char *name;
	int (*limits)(struct iommu_domain *domain, struct dma_bounce_limits *limits);
	void *(*add)(struct iommu_domain *domain, dma_addr_t iova, size_t *size, int prot);
	bool (*del)(struct iommu_domain *domain, dma_addr_t iova, void *va, size_t size);
	int (*lend)(struct iommu_domain *domain, struct dma_bounce_region *region);
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
